package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// app is the application: accounts upload files within their plans.
type app struct {
	pool    *pgxpool.Pool
	river   *river.Client[pgx.Tx]
	metered *metered.Client
	plans   map[string]plan // by account

	// written is called by the command's function after its writes, for the demonstration to cause trouble there.
	written func(context.Context, *metered.Tx) error
}

// plan is how many bytes an account may upload.
type plan struct{ Hourly, Daily int64 }

func newApp(pool *pgxpool.Pool, plans map[string]plan) (*app, error) {
	a := &app{pool: pool, plans: plans}
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(a.process))
	var err error
	a.river, err = river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}},
		Workers: workers,
		Plugins: []rivertype.Plugin{jobs.Plugin()}, // needed for jobs.Options.Key
		Logger:  slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	})
	if err != nil {
		return nil, err
	}
	a.metered, err = metered.New(pool, metered.Config{River: a.river, TokenPrefix: "quickstart_upload"})
	return a, err
}

const purpose = "upload"

// grant is a token's payload: the bounds of an upload.
type grant struct {
	Name     string `json:"name"`
	MaxBytes int    `json:"max_bytes"`
}

// mint makes grants for an account, each good for one upload within the next hour.
func (a *app) mint(ctx context.Context, account string, grants ...grant) ([]tokens.Minted, error) {
	mints := make([]tokens.Mint, len(grants))
	for i, g := range grants {
		mints[i] = tokens.Mint{Purpose: purpose, Subject: account, Payload: g, TTL: time.Hour}
	}
	var minted []tokens.Minted
	err := pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) (err error) {
		minted, err = a.metered.Tokens.MintMany(ctx, tx, mints)
		return err
	})
	return minted, err
}

// scopeOf is the budget that an account's uploads are charged to.
func scopeOf(account string) string { return budget.ScopeKey("upload-bytes", account, "") }

// limits are part of the call and stored nowhere: a new plan applies with the next upload.
func (p plan) limits() []budget.Limit {
	return []budget.Limit{budget.PerWindow(p.Hourly, time.Hour), budget.PerWindow(p.Daily, 24*time.Hour)}
}

// cost is in bytes, but at least 1: there is no charge of nothing.
func cost(size int) int64 { return max(1, int64(size)) }

// upload is a request to store a file.
type upload struct {
	Operation      string // chosen by the client. The same one again is the same upload
	Account, Token string
	Name           string
	Content        []byte
}

// stored is the answer to it.
type stored struct {
	Row   int64 `json:"row"`
	Bytes int   `json:"bytes"`
	Job   int64 `json:"job"`
}

const insertUploadSQL = `insert into uploads (account, name, content) values ($1, $2, $3) returning id`

// upload is the metered command: it charges the account, spends the token, stores the row and enqueues the job, all or
// nothing.
func (a *app) upload(ctx context.Context, u upload) (metered.Outcome[stored], error) {
	scope := scopeOf(u.Account)
	input := fmt.Sprintf("%s %x", u.Name, sha256.Sum256(u.Content)) // the same id with another file is a conflict
	return metered.Do(ctx, a.metered, metered.Command{
		ID: u.Operation, Tenant: u.Account, Name: "upload", Input: input,
		Token: &metered.Redeem{Purpose: purpose, Subject: u.Account, Presented: u.Token},
		Charges: []budget.Charge{{
			Scope: scope, Amount: cost(len(u.Content)), Limits: a.plans[u.Account].limits(), Note: budget.Note{Reason: u.Name},
		}},
	}, func(ctx context.Context, tx *metered.Tx) (stored, error) {
		var g grant
		if err := tx.Grant.Decode(&g); err != nil {
			return stored{}, err
		}
		if u.Name != g.Name || len(u.Content) > g.MaxBytes {
			return stored{}, tokens.ErrInvalid // rolls back: the token stays unspent
		}
		s := stored{Bytes: len(u.Content)}
		if err := tx.QueryRow(ctx, insertUploadSQL, u.Account, u.Name, u.Content).Scan(&s.Row); err != nil {
			return stored{}, err
		}
		// The operation's id keeps this command from enqueueing twice. The key keeps out others, such as a backfill.
		job, err := tx.Enqueue(ctx, ProcessUpload{Row: s.Row},
			&jobs.Options{Key: fmt.Sprintf("upload/%d", s.Row), Tenant: u.Account})
		if err != nil {
			return stored{}, err
		}
		s.Job = job.JobID
		if a.written != nil {
			return s, a.written(ctx, tx)
		}
		return s, nil
	})
}

// ProcessUpload is the job that describes an upload.
type ProcessUpload struct {
	Row int64 `json:"row"`
}

// Kind names the job for River.
func (ProcessUpload) Kind() string { return "process_upload" }

// process may run more than once for a job, as in any queue, and then writes the same again.
func (a *app) process(ctx context.Context, job *river.Job[ProcessUpload]) error {
	var content []byte
	err := a.pool.QueryRow(ctx, `select content from uploads where id = $1`, job.Args.Row).Scan(&content)
	if err != nil {
		return err
	}
	digest := sha256.Sum256(content)
	_, err = a.pool.Exec(ctx, `update uploads set sha256 = $2, media_type = $3 where id = $1`,
		job.Args.Row, digest[:], http.DetectContentType(content))
	return err
}
