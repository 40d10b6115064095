.PHONY: help run test race lint bench

MODULES = $$(go list -m -f '{{.Dir}}')
STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' Makefile

run: ## run the quickstart on a throwaway Postgres
	go run ./examples/quickstart

test: ## run all tests of all modules
	go test work

race: ## run all tests with the race detector
	go test -race work

lint: ## check formatting, vet and staticcheck
	@test -z "$$(gofmt -l .)" || { gofmt -l .; echo "run gofmt -w on these"; exit 1; }
	go vet work
	@for dir in $(MODULES); do echo "staticcheck $$dir"; (cd "$$dir" && $(STATICCHECK) ./...) || exit 1; done

bench: ## measure what it costs: a table, and a report in bench/out
	go -C bench run .
