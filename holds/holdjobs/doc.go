// Package holdjobs has River workers for jobs whose cost is known at their end, and for holds that
// are due.
package holdjobs
