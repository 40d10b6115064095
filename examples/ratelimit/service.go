package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"sync"
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

	// shadow counts refusals, and lets them pass: to try limits out.
	shadow bool
	mu     sync.Mutex
	over   map[string]int // attempts that a limit would have refused, by its name
}

func newService(pool *pgxpool.Pool, limits limits, shadow bool) (*service, error) {
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
	return &service{metered: client, limits: limits, policies: policies, offers: offers, shadow: shadow, over: map[string]int{}}, nil
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
	own, all := s.limits.Client, s.limits.All
	if s.shadow {
		own, all = lifted(own), lifted(all)
	}
	return []budget.Charge{
		{Scope: budget.ScopeKey("redeem-client", client, ""), Amount: 1, Limits: own},
		{Scope: budget.ScopeKey("redeem", "all", ""), Amount: 1, Limits: all},
	}
}

// lifted limits refuse nothing, and their standings tell all the same.
func lifted(limits []budget.Limit) []budget.Limit {
	var high []budget.Limit
	for _, l := range limits {
		l.Max = budget.MaxLimit
		high = append(high, l)
	}
	return high
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
	if s.shadow {
		s.count(tried)
	} else {
		s.policies.Show(w.Header(), tried)
	}
	if err != nil {
		if status := s.policies.Write(w, err); status >= http.StatusInternalServerError {
			slog.Error("redeem failed", "operation", id, "status", status, "error", err)
		}
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// count reports the limits that would have refused an attempt. Every attempt is charged in shadow mode, so a client
// stays over for as long as it sends more than its limit.
func (s *service) count(tried budget.Receipt) {
	maxima := map[string]int64{}
	for _, l := range slices.Concat(s.limits.Client, s.limits.All) {
		maxima[l.Name] = l.Max
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, entry := range tried.Entries {
		for _, standing := range entry.Standings {
			if name := standing.Limit.Name; standing.Used+standing.Held > maxima[name] {
				s.over[name]++
				slog.Info("would have refused", "limit", name, "used", standing.Used, "max", maxima[name])
			}
		}
	}
}

// clientOf identifies a client by its address: a client of a public command can change anything else. An
// IPv6 address counts by its /64, which is what one customer has. A proxy on this machine is believed, and only the
// last address of its X-Forwarded-For, which the proxy added.
func clientOf(r *http.Request) string {
	host, _, _ := net.SplitHostPort(r.RemoteAddr)
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return "unknown" // not over TCP: all of these are one client
	}
	if forwarded := r.Header.Values("X-Forwarded-For"); addr.IsLoopback() && len(forwarded) > 0 {
		list := strings.Split(forwarded[len(forwarded)-1], ",")
		if last, err := netip.ParseAddr(strings.TrimSpace(list[len(list)-1])); err == nil {
			addr = last
		}
	}
	addr = addr.Unmap().WithZone("")
	bits := 64
	if addr.Is4() {
		bits = 32
	}
	return netip.PrefixFrom(addr, bits).Masked().String()
}
