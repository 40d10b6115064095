// Package holdjobs has River workers: NewWorker for jobs whose cost is known at their end, NewCleanupWorker for holds
// that are due.
package holdjobs
