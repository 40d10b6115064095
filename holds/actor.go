package holds

// Values of Note.Actor.
const (
	System    = "system"
	Anonymous = "anonymous"
)

// User is a user of the application.
func User(id string) string { return "user:" + id }

// Job is a background job.
func Job(name string) string { return "job:" + name }
