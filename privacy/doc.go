// Package privacy gives out what a ledger knows of a person, and takes the person's name out of it
// (docs/privacy.md).
//
// A person is a name of yours, such as "user/ann". Export yields the rows that have it. Pseudonymize
// puts an alias in its place: in names of scopes, tenants and holders, in ids, notes, metadata and
// results. The units stay, so sums, chains and replays stay right, and the alias goes on with the
// balance.
package privacy
