package holds

// Actors, for Note.Actor: who did it, by kind and name.
const (
	System    = "system"    // the program itself, such as a sweeper
	Anonymous = "anonymous" // somebody unknown
)

// User is a user of the application.
func User(id string) string { return "user:" + id }

// Job is a background job.
func Job(name string) string { return "job:" + name }
