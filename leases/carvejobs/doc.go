// Package carvejobs gives part of a budget (home) to a child scope on another Postgres cluster
// (away), as leases.Carver does on one (docs/scale.md).
//
// Each step is a metered command with the child as operation id. A River job that commits with one
// step runs the next:
//
//	home: carve    all units count as held at the parent
//	away: credit   the child has them, or nothing if its time is over
//	away: close    at the deadline, or early by End: the child takes no more charges
//	home: settle   units that the child spent are captured at the parent, and the rest is free there
//	away: note     a purge may take the child's row, after its end
//
// Until home settles, all units count there, even past the deadline.
//
// River repeats the job of a killed worker after river.Config.RescueStuckJobsAfter, 1h by default:
// set it lower.
package carvejobs
