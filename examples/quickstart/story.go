package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"net/http"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/tokens"
)

// account uploads the files. Its plan has room for them and for a few small ones later on.
const account = "acme"

const spare = 1000

func plansFor(files []file) map[string]plan {
	hourly := int64(spare)
	for _, f := range files {
		hourly += cost(len(f.Content))
	}
	return map[string]plan{
		account: {Hourly: hourly, Daily: 3 * hourly},
		racing:  {Hourly: room * raceBytes, Daily: 3 * room * raceBytes},
	}
}

// prepare mints a grant for a file and returns the request that would redeem it.
func (s *story) prepare(ctx context.Context, f file) sent {
	minted := must(s.app.mint(ctx, account, grant{f.Name, len(f.Content)}))
	return sent{metered.NewID(), account, minted[0].Token.Reveal(), f}
}

func (s *story) uploads(ctx context.Context) {
	s.title("Uploads: one grant per file, redeemed over HTTP")
	p := s.app.plans[account]
	s.line("%s may upload %d bytes an hour, %d a day", account, p.Hourly, p.Daily)
	for i, f := range s.files {
		request := s.prepare(ctx, f)
		a := must(s.client.upload(ctx, request))
		check(s.report, f.Name+" stored, status", a.status, http.StatusCreated)
		if i == 0 {
			s.first.request, s.first.answer = request, a
		}
	}
	s.awaitWorkers(ctx)
	s.showRows(ctx)
}

// awaitWorkers returns when River's workers have described every upload.
func (s *story) awaitWorkers(ctx context.Context) {
	ctx, cancel := context.WithTimeoutCause(ctx, 15*time.Second, errors.New("the workers did not finish"))
	defer cancel()
	ok(poll(ctx, func() (done bool, err error) {
		err = s.db.Pool.QueryRow(ctx, `select not exists (select from uploads where sha256 is null)`).Scan(&done)
		return done, err
	}))
}

func poll(ctx context.Context, f func() (done bool, err error)) error {
	for {
		done, err := f()
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil || done:
			return err
		}
		select {
		case <-ctx.Done():
		case <-time.After(10 * time.Millisecond):
		}
	}
}

const rowsSQL = `
select u.name, length(u.content), u.media_type, encode(u.sha256, 'hex'), j.id
from uploads u join river_job j on j.kind = 'process_upload' and (j.args->>'row')::bigint = u.id
where u.account = $1 order by u.id`

func (s *story) showRows(ctx context.Context) {
	rows := must(s.db.Pool.Query(ctx, rowsSQL, account))
	defer rows.Close()
	table := [][]any{{"name", "bytes", "media type", "SHA-256", "job"}}
	right := 0
	for rows.Next() {
		var name, mediaType, digest string
		var size, job int64
		ok(rows.Scan(&name, &size, &mediaType, &digest, &job))
		if n := len(table) - 1; n < len(s.files) {
			if sum := sha256.Sum256(s.files[n].Content); digest == hex.EncodeToString(sum[:]) {
				right++
			}
		}
		table = append(table, []any{name, size, mediaType, digest[:16] + "…", job})
	}
	ok(rows.Err())
	s.table(table...)
	check(s.report, "rows whose digest, by the worker, is the file's", right, len(s.files))
}

func (s *story) inspect(ctx context.Context, request sent) (tokens.Info, error) {
	return s.app.metered.Tokens.Inspect(ctx, s.db.Pool, purpose, request.account, request.token)
}

// unspent checks that a token can still be used.
func (s *story) unspent(ctx context.Context, request sent) {
	info, err := s.inspect(ctx, request)
	if !errors.Is(err, tokens.ErrInvalid) {
		ok(err)
	}
	check(s.report, "uses left of its token", info.UsesLeft, 1)
}

func (s *story) unchanged(ctx context.Context, before counts) {
	check(s.report, "in the database as before", must(count(ctx, s.db.Pool)), before)
}
