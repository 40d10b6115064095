package holds

// Values of Note.Actor.
const (
	System    = "system"
	Anonymous = "anonymous"
)

// User is the Note.Actor of a user.
func User(id string) string { return "user:" + id }

// Job is the Note.Actor of a background job.
func Job(name string) string { return "job:" + name }
