-- name: CreateDocument :one
insert into documents (owner, title) values ($1, $2) returning *;

-- name: RenameDocument :execrows
update documents set title = $3 where owner = $1 and title = $2;

-- name: Documents :many
select * from documents where owner = $1 order by title;

-- name: DeleteDocuments :exec
delete from documents where owner = $1;

-- name: ImportDocuments :copyfrom
insert into documents (owner, title) values ($1, $2);

-- name: TouchDocuments :batchexec
update documents set title = $2 where id = $1;
