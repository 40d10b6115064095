module github.com/pgmetered/metered/notary

go 1.26.0

require (
	github.com/jackc/pgx/v5 v5.12.0
	github.com/pgmetered/metered v0.0.0-20261128130007-add2576967a1
	github.com/stretchr/testify v1.12.1
	golang.org/x/mod v0.42.0
)
