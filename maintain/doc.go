// Package maintain runs all sweeps and purges in one call (docs/operations.md). Package
// maintainjobs has a River job of it.
package maintain
