package purge

// These statements stand here, and not in the packages that offer the purge: package maintain runs
// them too, and links no River.
const (
	// Operations takes, after the arguments of Run, how many milliseconds it may wait for locks.
	Operations = `select deleted, last from metered.purge_operations($1, metered.clock() - $2::interval, $3, $4)`
	JobKeys    = `select deleted, last from metered.purge_job_keys($1, metered.clock() - $2::interval, $3)`
)
