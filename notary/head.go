package notary

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

// Head is a signed head of the log.
type Head struct {
	// Size is the number of entries in the log.
	Size int64 `json:"size"`

	// Root is the hash over all of them.
	Root tlog.Hash `json:"root"`

	// At is when the head was signed, by the database's clock: nobody vouches for it.
	At time.Time `json:"at"`

	// Note is the head in the form of golang.org/x/mod/sumdb/note. Its text is that of a checkpoint
	// of C2SP's tlog-checkpoint: the signer's name, the size, the root, and the time. Keep it where
	// nobody who can write to the database can change it.
	Note string `json:"note"`
}

// sign makes a head.
func sign(size int64, root tlog.Hash, at time.Time, signer note.Signer) (Head, error) {
	text := fmt.Sprintf("%s\n%d\n%s\n%s\n", signer.Name(), size, root,
		at.UTC().Format(time.RFC3339))
	signed, err := note.Sign(&note.Note{Text: text}, signer)
	return Head{size, root, at, string(signed)}, err
}

// open checks the signature of a head, and reads it.
func open(signed []byte, verifier note.Verifier) (Head, error) {
	n, err := note.Open(signed, note.VerifierList(verifier))
	if err != nil {
		return Head{}, fmt.Errorf("%w: %w", ErrHead, err)
	}
	h := Head{Note: string(signed)}
	lines := strings.Split(n.Text, "\n")
	if len(lines) < 5 || lines[0] != verifier.Name() {
		return Head{}, fmt.Errorf("%w: it has %d lines, of the log %q", ErrHead, len(lines),
			lines[0])
	}
	if h.Size, err = strconv.ParseInt(lines[1], 10, 64); err == nil {
		h.Root, err = tlog.ParseHash(lines[2])
	}
	if err == nil {
		h.At, err = time.Parse(time.RFC3339, lines[3])
	}
	if err != nil || h.Size < 0 {
		return Head{}, fmt.Errorf("%w: %w", ErrHead, err)
	}
	return h, nil
}
