package metered

// MigrationLock is the advisory lock that migrations queue on.
var MigrationLock = migrationLock
