package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
)

// alert is a job: a threshold was crossed. The transaction that crosses it enqueues the job, so there is one for each
// crossing, and none after a rollback. An estimate, too, can cross a threshold that counts held units.
type alert struct {
	ID           string    `json:"id"` // the same in each delivery
	Organisation string    `json:"organisation"`
	Account      string    `json:"account"`
	Limit        string    `json:"limit"`
	Threshold    string    `json:"threshold"`
	Used         int64     `json:"used"` // of credit, less the granted units
	Held         int64     `json:"held"`
	Max          int64     `json:"max"`
	At           time.Time `json:"at"`
}

// alert is called in each transaction that crosses a threshold.
func (g *gateway) alert(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
	_, account, _, err := budget.SplitScope(c.Scope)
	if err != nil {
		return err
	}
	organisation, _, _ := strings.Cut(account, "/")
	_, err = g.river.InsertTx(ctx, tx, alert{
		ID:           fmt.Sprintf("%s#%d %s %s", c.Scope, c.Seq, c.Limit.Name, c.Threshold.Name),
		Organisation: organisation, Account: account, Limit: c.Limit.Name, Threshold: c.Threshold.Name,
		Used: c.Used, Held: c.Held, Max: c.Limit.Max, At: c.At,
	}, nil)
	return err
}

// Kind is the job's kind.
func (alert) Kind() string { return "alert" }

// sender posts alerts to the organisation's webhook, signed as the Standard Webhooks specification has it. An answer other
// than 2xx is tried again by River, for days, so a receiver may get one twice: with the same webhook-id.
type sender struct {
	river.WorkerDefaults[alert]
	g *gateway
}

const webhookSQL = `select coalesce(webhook, ''), webhook_secret from accounts where id = $1`

// Work sends one.
func (s *sender) Work(ctx context.Context, job *river.Job[alert]) error {
	var url string
	var secret []byte
	if err := s.g.pool.QueryRow(ctx, webhookSQL, job.Args.Organisation).Scan(&url, &secret); err != nil {
		return err
	}
	if url == "" {
		return river.JobCancel(fmt.Errorf("%s has no webhook", job.Args.Organisation))
	}
	body, err := json.Marshal(job.Args)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	post, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	at := strconv.FormatInt(time.Now().Unix(), 10)
	post.Header.Set("Content-Type", "application/json")
	post.Header.Set("webhook-id", job.Args.ID)
	post.Header.Set("webhook-timestamp", at)
	post.Header.Set("webhook-signature", sign(secret, job.Args.ID, at, body))
	res, err := s.g.http.Do(post)
	if err != nil {
		return err
	}
	res.Body.Close()
	if res.StatusCode/100 != 2 {
		return fmt.Errorf("the webhook answers %s", res.Status)
	}
	return nil
}

// sign is the signature of a delivery. A receiver makes the same from the request, and compares with hmac.Equal.
func sign(secret []byte, id, at string, body []byte) string {
	mac := hmac.New(sha256.New, secret)
	fmt.Fprintf(mac, "%s.%s.%s", id, at, body)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}
