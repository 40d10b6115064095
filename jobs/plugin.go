package jobs

import (
	"context"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Plugin gives keyed jobs the id that was claimed with their key. Put it once into the Config.Plugins of every client that an Enqueuer
// uses.
func Plugin() rivertype.Plugin { return &plugin{} }

type plugin struct{ river.HookDefaults }

var (
	_ rivertype.Plugin          = (*plugin)(nil)
	_ rivertype.HookInsertBegin = (*plugin)(nil)
)

// ident identifies a key.
type ident struct{ queue, key string }

// claimed holds the ids of one call's keys, in the context of River's insert.
type claimed map[ident]int64

type claimedKey struct{}

// InsertBegin recognises a job by the key in its metadata and not by its place in
// the call: a hook of the user's may insert jobs of its own with the same context.
func (*plugin) InsertBegin(ctx context.Context, params *rivertype.JobInsertParams) error {
	ids, ok := ctx.Value(claimedKey{}).(claimed)
	if !ok {
		return nil
	}
	if id, ok := ids[ident{params.Queue, readMetadata(params.Metadata).Key}]; ok {
		params.ID = &id
	}
	return nil
}
