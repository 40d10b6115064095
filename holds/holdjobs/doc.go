// Package holdjobs has the River workers that belong to holds. NewWorker holds a job's estimated cost until its
// actual cost is known. NewCleanupWorker ends a hold when its time is over.
package holdjobs
