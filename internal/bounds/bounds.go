// Package bounds has the bounds of package budget's arguments, for the packages built on it.
package bounds

import "time"

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
	MaxScopeThresholds    = 64                     // that one scope remembers
	MaxThresholdNameBytes = 64                     // of Threshold.Name, and of the Name of a limit with thresholds
)
