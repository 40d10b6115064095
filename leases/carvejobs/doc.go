// Package carvejobs carves part of a budget for a scope on another Postgres cluster. So one budget serves several clusters,
// each with the speed of its own disk, and no coordinator but Postgres.
//
//	clusters, err := carvejobs.New(map[string]*metered.Client{"eu": eu, "us": us}, carvejobs.Config{})
//	clusters.AddWorkers(workers) // of the River clients of both clusters
//	lease, err := clusters.Carve(ctx, carvejobs.Carving{
//		Link: carvejobs.Link{Home: "eu", Away: "us", Child: "acme/us/17"},
//		From: budget.Charge{Scope: "acme", Amount: 10_000, Limits: limits}, TTL: time.Hour,
//	})
//
// It is a transfer with an outbox. Each step is a metered command, whose operation id is the child, carried to the other
// cluster by a River job that commits with the step before. So each happens once, whatever dies in between:
//
//	home: carve    all units count as held at the parent
//	away: credit   the child has them; after their time it gets nothing, and tells that
//	away: close    at the deadline, or early by Close: nothing new is let in; what was used is known
//	home: settle   what was used is captured at the parent, and the rest is free there
//	away: note     the parent's side is settled: a purge may take the child's row, after its end
//
// Until home is told, all units count there, after the deadline too. So no limit is exceeded while a cluster or the
// network is away, and what is unused comes back soon after both are there again. For a cluster that is lost for good
// there is WriteOff.
//
// River runs the job of a worker that was killed again after river.Config.RescueStuckJobsAfter, 1h by default: set it lower.
package carvejobs
