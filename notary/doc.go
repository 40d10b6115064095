// Package notary makes a log of a ledger's entries that others can check (docs/notary.md).
//
// The log is a Merkle tree with a leaf for each entry. Notarize takes down the entries that are not in it
// yet, and signs a head: the size of the log and one hash over all of it. Whoever keeps a head can find
// out later, with Verify, whether an entry before it was changed, cut off or removed. Whoever has a
// Receipt can show, to anybody and without a database, that an entry is in the log of a head.
//
// No charge knows of the log: it is made beside the ledger.
package notary
