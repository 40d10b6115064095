// Package holdjobs has the River workers that belong to holds: jobs whose estimated cost is held
// until their actual cost is known (NewWorker), and jobs that end a hold when its time is over
// (NewCleanupWorker).
package holdjobs
