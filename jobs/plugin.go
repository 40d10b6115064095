package jobs

import (
	"context"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
)

// Plugin is needed for keys and Options.Hold, once in the Config.Plugins of every client that an
// Enqueuer uses.
func Plugin() rivertype.Plugin { return &plugin{} }

type plugin struct{ river.HookDefaults }

var (
	_ rivertype.Plugin              = (*plugin)(nil)
	_ rivertype.HookInsertBegin     = (*plugin)(nil)
	_ rivertype.JobInsertMiddleware = (*plugin)(nil)
)

// IsMiddleware makes it one.
func (*plugin) IsMiddleware() bool { return true }

// gatedParams is where the parameters go that River has prepared for gated jobs, in the context of
// its insert.
type gatedParams struct{ all []*rivertype.JobInsertParams }

type gatedKey struct{}

// InsertMany takes gated jobs, and inserts none of them. A call has gated jobs alone.
func (*plugin) InsertMany(ctx context.Context, params []*rivertype.JobInsertParams,
	inner func(context.Context) ([]*rivertype.JobInsertResult,
		error)) ([]*rivertype.JobInsertResult, error) {
	to, ok := ctx.Value(gatedKey{}).(*gatedParams)
	if !ok {
		return inner(ctx)
	}
	to.all = append(to.all, params...)
	results := make([]*rivertype.JobInsertResult, len(params))
	for i, p := range params {
		results[i] = &rivertype.JobInsertResult{Job: &rivertype.JobRow{
			EncodedArgs: p.EncodedArgs, Kind: p.Kind, MaxAttempts: p.MaxAttempts,
			Metadata: p.Metadata, Priority: p.Priority, Queue: p.Queue, State: p.State,
			Tags: p.Tags,
		}}
	}
	return results, nil
}

// ident identifies a key.
type ident struct{ queue, key string }

// claimed holds the ids of one call's keys, in the context of River's insert, and those that River
// was given.
type claimed struct {
	ids   map[ident]int64
	given map[int64]*rivertype.JobInsertParams
}

type claimedKey struct{}

// InsertBegin recognises a job by the key in its metadata and not by its place in
// the call: a hook of the user's may insert jobs of its own with the same context.
func (*plugin) InsertBegin(ctx context.Context, params *rivertype.JobInsertParams) error {
	call, ok := ctx.Value(claimedKey{}).(claimed)
	if !ok {
		return nil
	}
	if id, ok := call.ids[ident{params.Queue, readMetadata(params.Metadata).Key}]; ok {
		params.ID = &id
		call.given[id] = params
	}
	return nil
}
