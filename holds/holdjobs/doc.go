// Package holdjobs has River workers for holds: NewWorker for jobs whose cost is known at their end, NewCleanupWorker
// for holds that are due.
package holdjobs
