package fault

import (
	"encoding/json"
	"errors"

	"github.com/jackc/pgx/v5"
)

// ErrUnread says that a call is committed, and that the program cannot read the answer.
var ErrUnread = New("answer_unreadable", "metered: committed, but the answer cannot be read by the types of the connection")

// Unreadable reports whether an answer came, and is of a form that the program cannot read.
func Unreadable(err error) bool {
	var scan pgx.ScanArgError
	var syntax *json.SyntaxError
	var typ *json.UnmarshalTypeError
	return errors.As(err, &scan) || errors.As(err, &syntax) || errors.As(err, &typ)
}
