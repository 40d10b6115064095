package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
)

// vouchersSQL is the application's own table.
const vouchersSQL = `
create table vouchers (
    code        text primary key,
    cents       bigint not null,
    redeemed_by text,
    redeemed_at timestamptz
)`

// limits are on attempts: at vouchers that exist and at guesses alike.
type limits struct {
	Client []budget.Limit // each client's own
	All    []budget.Limit // all clients together
}

// service redeems vouchers for whoever asks.
type service struct {
	metered  *metered.Client
	limits   limits
	policies *httpmetered.Policies
	offers   *offers
}

func newService(pool *pgxpool.Pool, limits limits) (*service, error) {
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		return nil, err
	}
	policies, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: limits.Client, Shared: limits.All})
	if err != nil {
		return nil, err
	}
	offers, err := newOffers(pool)
	if err != nil {
		return nil, err
	}
	return &service{client, limits, policies, offers}, nil
}

// close gives the leases back.
func (s *service) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return s.offers.leases.Close(ctx)
}

// attempt is the charges of one attempt. The limits are no part of the command's identity: a request that is repeated
// after they were changed is still the same.
func (s *service) attempt(client string) []budget.Charge {
	return []budget.Charge{
		{Scope: budget.ScopeKey("redeem-client", client, ""), Amount: 1, Limits: s.limits.Client},
		{Scope: budget.ScopeKey("redeem", "all", ""), Amount: 1, Limits: s.limits.All},
	}
}

var (
	errNoCode    = &httpmetered.Problem{Status: http.StatusBadRequest, Detail: `want {"code": "…"}, of letters and digits`}
	errNoVoucher = &httpmetered.Problem{Status: http.StatusNotFound, Detail: "no such voucher, or it was redeemed before"}
)

type voucher struct {
	Cents int64 `json:"cents"`
}

const redeemSQL = `
update vouchers set redeemed_by = $2, redeemed_at = now()
where code = $1 and redeemed_by is null
returning cents`

// redeem spends a voucher, and charges an attempt whether there is one or not. tried has the units left of the limits
// after the attempt, however that ended. It is empty if none was charged: for a refusal, and for the repetition of a
// request that succeeded.
func (s *service) redeem(ctx context.Context, id, client, code string) (v voucher, tried budget.Receipt, err error) {
	out, err := metered.Do(ctx, s.metered, metered.Command{
		ID: id, Tenant: client, Name: "redeem", Input: code, Sticky: s.attempt(client),
	}, func(ctx context.Context, tx *metered.Tx) (v voucher, err error) {
		err = tx.QueryRow(ctx, redeemSQL, code, client).Scan(&v.Cents)
		if errors.Is(err, pgx.ErrNoRows) {
			err = errNoVoucher
		}
		return v, err
	})
	return out.Result, out.Sticky, err
}

// handler serves GET /offers, and POST /redeem with {"code": "…"}. With an Idempotency-Key a request that is repeated because its answer
// was lost is answered again, and not charged again.
func (s *service) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /redeem", s.serveRedeem)
	mux.Handle("GET /offers", s.offers.limited(http.HandlerFunc(serveOffers)))
	return mux
}

var codeForm = regexp.MustCompile(`^[A-Za-z0-9-]{1,64}$`)

func (s *service) serveRedeem(w http.ResponseWriter, r *http.Request) {
	var request struct {
		Code string `json:"code"`
	}
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1024)).Decode(&request); err != nil || !codeForm.MatchString(request.Code) {
		httpmetered.Write(w, errNoCode)
		return
	}
	id, err := httpmetered.OptionalKey(r)
	if err != nil {
		httpmetered.Write(w, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), 10*time.Second)
	defer cancel()
	v, tried, err := s.redeem(ctx, id, clientOf(r), request.Code)
	s.policies.Show(w.Header(), tried)
	if err != nil {
		if status := s.policies.Write(w, err); status >= http.StatusInternalServerError {
			slog.Error("redeem failed", "operation", id, "status", status, "error", err)
		}
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// clientOf identifies a client by its address: a client of a public command can change anything else. A proxy on this
// machine is believed, and only the last address of its X-Forwarded-For, which the proxy added.
func clientOf(r *http.Request) string {
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	if forwarded := r.Header.Values("X-Forwarded-For"); net.ParseIP(host).IsLoopback() && len(forwarded) > 0 {
		list := strings.Split(forwarded[len(forwarded)-1], ",")
		return strings.TrimSpace(list[len(list)-1])
	}
	return host
}
