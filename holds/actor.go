package holds

// Actors, for Note.Actor: who did it, by kind and name.
const (
	// System is the program itself, such as a sweeper.
	System = "system"
	// Anonymous is somebody unknown.
	Anonymous = "anonymous"
)

// User is a user of the application.
func User(id string) string { return "user:" + id }

// Job is a background job.
func Job(name string) string { return "job:" + name }
