create table documents (
    id bigint generated always as identity primary key,
    owner text not null,
    title text not null,
    unique (owner, title)
);
