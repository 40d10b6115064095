// Package maintain runs all sweeps and purges in one call. A sweep ends and announces holds, leases and lots whose time
// is over. A purge deletes old rows. No answer depends on either. Package maintainjobs has a River job of it, and
// docs/operations.md a guide.
package maintain
