// Package integration holds whole-system tests: on the Postgres of a
// container, through crashes of the server, and from several processes. It is a
// module of its own so that testcontainers does not become a dependency of those
// who import metered.
package integration
