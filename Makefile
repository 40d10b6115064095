.PHONY: help run quick test long interleave histories mutants matrix hostile soak race lint bench figures vulncheck licenses

MODULES = $$(go list -m -f '{{.Dir}}')
STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2 work
GOVULNCHECK = go run golang.org/x/vuln/cmd/govulncheck@v1.9.0
GOLICENSES = go run github.com/google/go-licenses@v1.6.0
# MPL-2.0 is River's: it asks for the source of its own files, if they were changed. What is ignored was read: xz (tests) is in the
# public domain.
LICENCES = --allowed_licenses=MIT,ISC,BSD-2-Clause,BSD-3-Clause,Apache-2.0,MPL-2.0 --ignore github.com/xi2/xz \
	--ignore github.com/pgmetered/metered

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' Makefile

run: ## run the quickstart on a throwaway Postgres
	go run ./examples/quickstart

quick: ## run the examples, and the tests that add up whole ledgers: under a minute, while you work
	go test -short -run 'Example|Docs|Verify|RoundTrip|AddsUp|Arguments' . ./internal/command ./budget ./wallet ./holds ./leases ./tokens ./jobs ./httpmetered ./sqlmetered

test: ## run all tests of all modules
	go test work

long: ## run them at full size: every place where a connection is cut, long random histories, soaks
	METERED_LONG=1 go test -timeout 1h work

interleave: ## run pairs of calls in each order of their statements: PREEMPTIONS=1, CALLS=charge+refund, ORDER=rc,rc:0.0.1, TOGETHER=3
	go test -C integration_test ./orders -count=1 -v -timeout 48h -orders 0 -preemptions $(or $(PREEMPTIONS),1) -together $(or $(TOGETHER),2) -calls "$(CALLS)" -order "$(ORDER)"

histories: ## record calls under faults, and look for an order that explains their answers: OPERATIONS=34000 in each setting
	go test -C integration_test ./histories -count=1 -v -timeout 6h -settings . -operations $(or $(OPERATIONS),34000)

mutants: ## break the library in each of many places, and run the test that must notice: ONLY='a lease is settled twice'
	go test -C integration_test ./mutants -count=1 -v -timeout 6h -only '$(or $(ONLY),.)'

matrix: ## make each call in each way, and through PgBouncer, on Postgres 14 to 18, and print a table
	.ci/matrix

hostile: ## call each function that a role may call with arguments made against it: CALLS=100000
	METERED_LONG=1 METERED_HOSTILE_CALLS=$(or $(CALLS),100000) go test ./internal/command -run TestGrants_NoCallBreaksAnInvariant -count=1 -v -timeout 3h

soak: ## run commands of all kinds while backends are killed and the server crashes: DURATION=2m
	end=$$(($$(date +%s) + $$(echo $(or $(DURATION),2m) | sed 's/h/*3600/; s/m/*60/; s/s//'))); while [ $$(date +%s) -lt $$end ]; do \
		METERED_LONG=1 go test -C integration_test . -run TestSoak -count=1 -v -timeout 1h || exit 1; done

race: ## run all tests with the race detector
	go test -race work

lint: ## check formatting, vet and staticcheck
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "run gofmt -w on these"; exit 1; }
	go vet work
	$(STATICCHECK)

bench: ## measure what it costs: a table
	go -C bench run .

figures: ## measure it, and write the figures into the pages that quote them
	go -C bench run . -write

vulncheck: ## look for known vulnerabilities in what the code calls, in all modules (asks vuln.go.dev)
	@for dir in $(MODULES); do echo "govulncheck $$dir"; (cd "$$dir" && $(GOVULNCHECK) -test ./...) || exit 1; done

licenses: ## check that all that is linked, tests included, has a licence that lets anybody link it
	@for dir in $(MODULES); do echo "licenses $$dir"; (cd "$$dir" && $(GOLICENSES) check --include_tests $(LICENCES) ./...) || exit 1; done
