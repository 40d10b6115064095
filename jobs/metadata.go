package jobs

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"

	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered/internal/jsonb"
)

// Members of a job's metadata that belong to this package.
const (
	metadataKey    = "metered:key"
	metadataTenant = "metered:tenant"
	metadataHold   = "metered:hold"
	metadataRetry  = "metered:retry"
)

// Of describes a job by its row and by what Enqueue wrote into its metadata. A job that another
// program inserted has no Key, Tenant and Hold. ClaimedAt is zero: Find has it.
func Of(job *rivertype.JobRow) Enqueued {
	own := readMetadata(job.Metadata)
	return Enqueued{ID: job.ID, Queue: job.Queue, Kind: job.Kind, Key: own.Key, Tenant: own.Tenant, Hold: own.Hold}
}

type ownMetadata struct {
	Key    string `json:"metered:key,omitempty"`
	Tenant string `json:"metered:tenant,omitempty"`
	Hold   string `json:"metered:hold,omitempty"` // of a job with Options.Hold
	Retry  *retry `json:"metered:retry,omitempty"`
}

// retry is what a job with Options.GiveBack is parked with until its next attempt.
type retry struct {
	choice
	Burst  *choice `json:"burst,omitempty"`
	Fair   string  `json:"fair"`
	WaitUS int64   `json:"wait_us,omitempty"`
}

// withHold adds a new id of the hold of a job to its metadata, which River's hooks have left an
// object. It is random, too, since River's sequence of ids can be set back.
func withHold(metadata []byte, id int64, again *retry) ([]byte, error) {
	members := map[string]json.RawMessage{}
	if len(metadata) > 0 {
		if err := json.Unmarshal(metadata, &members); err != nil || members == nil {
			return nil, errPlugin
		}
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	members[metadataHold] = fmt.Appendf(nil, `"job/%d/%x"`, id, random)
	if again != nil {
		members[metadataRetry], _ = json.Marshal(again) // texts
	}
	return json.Marshal(members)
}

func readMetadata(metadata []byte) (own ownMetadata) {
	if bytes.Contains(metadata, []byte("metered:")) {
		_ = json.Unmarshal(metadata, &own) // not an object, so not ours
	}
	return own
}

// withOwn adds this package's members to the caller's metadata, and checks the
// caller's.
func withOwn(field string, metadata []byte, own ownMetadata) ([]byte, error) {
	if len(metadata) == 0 {
		if own == (ownMetadata{}) {
			return nil, nil
		}
		return json.Marshal(own)
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(metadata, &members); err != nil || members == nil {
		return nil, invalid(field, "want a JSON object")
	}
	if err := jsonb.Check(metadata); err != nil {
		return nil, invalid(field, "%s", err)
	}
	for _, name := range []string{metadataKey, metadataTenant, metadataHold, metadataRetry} {
		if _, ok := members[name]; ok {
			return nil, invalid(field, "the member %q is this package's", name)
		}
	}
	if own == (ownMetadata{}) {
		return metadata, nil
	}
	for name, value := range map[string]string{metadataKey: own.Key, metadataTenant: own.Tenant} {
		if value == "" {
			continue
		}
		encoded, err := json.Marshal(value)
		if err != nil {
			return nil, err // never: it is a string
		}
		members[name] = encoded
	}
	return json.Marshal(members)
}
