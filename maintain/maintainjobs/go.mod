module github.com/pgmetered/metered/maintain/maintainjobs

go 1.25.0

require (
	github.com/jackc/pgx/v5 v5.12.0
	github.com/pgmetered/metered v0.0.0-20261130000828-d48c22069947
	github.com/riverqueue/river v0.44.0
	github.com/riverqueue/river/riverdriver/riverpgxv5 v0.44.0
	github.com/riverqueue/river/rivertype v0.44.0
	github.com/stretchr/testify v1.12.1
)

require (
	github.com/fergusstrange/embedded-postgres v1.34.0 // indirect
	github.com/jackc/pgpassfile v1.0.0 // indirect
	github.com/jackc/pgservicefile v0.0.0-20240606120523-5a60cdf6a761 // indirect
	github.com/jackc/puddle/v2 v2.2.3 // indirect
	github.com/lib/pq v1.10.9 // indirect
	github.com/riverqueue/river/riverdriver v0.44.0 // indirect
	github.com/riverqueue/river/rivershared v0.44.0 // indirect
	github.com/tidwall/gjson v1.19.0 // indirect
	github.com/tidwall/match v1.2.0 // indirect
	github.com/tidwall/pretty v1.2.1 // indirect
	github.com/tidwall/sjson v1.2.5 // indirect
	github.com/xi2/xz v0.0.0-20171230120015-48954b6210f8 // indirect
	go.yaml.in/yaml/v3 v3.0.5 // indirect
	golang.org/x/sync v0.22.0 // indirect
	golang.org/x/text v0.41.0 // indirect
)
