// Package bounds has the bounds of the arguments of packages budget and holds, for them and the
// packages built on them.
package bounds

import "time"

// Of package budget.
const (
	MaxAmount             = 1 << 53                // of one entry: exact as a JSON number
	MaxLimit              = 1 << 62                // of Limit.Max
	MaxBatch              = 1000                   // charges or events of one call
	MaxWindow             = 36525 * 24 * time.Hour // of Limit.Window, about a century
	MaxScopeBytes         = 255                    // of a scope, in UTF-8
	MaxScopes             = 64                     // distinct scopes in one call
	MaxLimits             = 16                     // of one scope in one call
	MaxQueries            = 1024                   // in one call of Usage
	MaxBuckets            = 2000                   // of a Series: a day by the minute, eleven weeks by the hour, five years by the day
	MaxResources          = 1000                   // scopes of a Create, and the answer of Resources
	MaxSearch             = 100_000                // entries that one search looks at
	MaxFound              = 1000                   // entries that one search finds
	MaxThresholds         = 8                      // of one Limit
	MaxPercent            = 1000                   // of Threshold.Percent
	MaxScopeThresholds    = 64                     // that one scope remembers
	MaxThresholdNameBytes = 64                     // of Threshold.Name, and of the Name of a limit with thresholds
)

// Of package holds.
const (
	MaxLifetime      = 10 * 366 * 24 * time.Hour // of Config.MaxLifetime, and of one extension
	MaxHolds         = 100                       // in one call: their scopes, at most 6,400, are about the room that a server has for locks by default
	MaxIDBytes       = 255                       // of an id, a tenant, a holder and an entity, in UTF-8
	MaxMetadataBytes = 64 << 10                  // of Request.Metadata
	MaxKeys          = 10_000                    // in one call of Claimed
	MaxPage          = 1000                      // holds of a page
	MaxSweepBatch    = 10_000                    // of SweepOptions.Batch
)
