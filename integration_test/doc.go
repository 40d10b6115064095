// Package integration holds whole-system tests: on the Postgres of a
// container, through crashes of the server, from several processes, and in a
// browser. It is a module of its own so that testcontainers and chromedp do not
// become dependencies of those who import metered.
package integration
