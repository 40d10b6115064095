package main

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// A charge without anything but the entry. Its sums are made up, as nothing is read: they take as
// many bytes as true ones.
const (
	floorChargeSQL = `
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, operation_tenant, operation, others)
values (nextval('metered.bench_seq'), 1, clock_timestamp(), 1, 0, 0, 0, 0, 'c', $1, $2, $3, null)`
	lockSQL = `select pg_advisory_xact_lock($1)`
)

// chargeFloor writes the entry and commits.
func chargeFloor(k *kit) contender {
	return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, floorChargeSQL, k.scope(), nil, nil)
		return err
	})
}

// unit is a charge that its limit lets in.
func unit(scope string) budget.Charge {
	return budget.Charge{Scope: scope, Amount: 1, Limits: roomy}
}

// units are n of them.
func units(n int, scope func() string) []budget.Charge {
	return several(n, func() budget.Charge { return unit(scope()) })
}

func several[T any](n int, next func() T) []T {
	all := make([]T, n)
	for i := range all {
		all[i] = next()
	}
	return all
}

// chargeMetered is the library's, as its documentation says to call it.
func chargeMetered(k *kit) contender {
	return k.does("", func(ctx context.Context) error { return k.charge(ctx, unit(k.scope())) })
}

// chargeQuiet asks for no standing.
func chargeQuiet(k *kit) contender {
	return k.does("", func(ctx context.Context) error {
		c := unit(k.scope())
		c.NoStandings = true
		return k.charge(ctx, c)
	})
}

// A hand-written charge: a function that raises a counter if that fits, and inserts a row of its
// history, in tables of its own. It knows no windows, and no sums of the past.
const counterSQL = `
create table metered.bench_counter (scope text collate "C" primary key, used bigint not null) with (fillfactor = 50);
insert into metered.bench_counter select 'scope/' || lpad(g::text, 18, '0'), 0 from generate_series(0, 999) g;
create table metered.bench_history (scope text collate "C", seq bigint, amount bigint not null, at timestamptz not null, primary key (scope, seq));
create function metered.bench_count(of_scope text, units bigint, most bigint) returns bigint language plpgsql as $$
declare
    n bigint;
begin
    update metered.bench_counter c set used = c.used + units where c.scope = of_scope and c.used + units <= most returning c.used into n;
    if not found then
        return null;
    end if;
    insert into metered.bench_history (scope, seq, amount, at) values (of_scope, n, units, clock_timestamp());
    return n;
end
$$;`

func chargeCounter(k *kit) contender {
	return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
		var n *int64
		err := tx.QueryRow(ctx, `select metered.bench_count($1, 1, $2)`, k.scope(), roomy[0].Max).Scan(&n)
		if err == nil && n == nil {
			err = budget.ErrExceeded
		}
		return err
	})
}

// In SQL: by the function for other languages, and by the one that Go calls, which takes rows and keys.
const (
	chargeV1SQL   = `select metered.v1_charge($1, 1, '[{"max": 1125899906842624, "window": "1000 hours"}]')`
	chargeRowsSQL = `
select metered.charge(array[row($1, metered._scope_key($1), 1, 0,
    array[row(1125899906842624, interval '1000 hours', null, null, null, null)::metered.charge_limit], null, null, null, null)::metered.new_charge],
    interval '1 minute', 5000, true)`
)

// chargeSQL charges by a statement.
func chargeSQL(statement string) func(*kit) contender {
	return func(k *kit) contender {
		return k.inTx(func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, statement, k.scope())
			return err
		})
	}
}

func (k *kit) charge(ctx context.Context, charges ...budget.Charge) error {
	return pgx.BeginFunc(ctx, k.Pool, func(tx pgx.Tx) error {
		_, err := k.client.Budget.Charge(ctx, tx, charges...)
		return err
	})
}

const boundMeaning = "the same by charges that ask for no standing, which a bound lets in"

var chargeFigures = []figure{
	rates("charge_vs_floor", atLeast(0.62), "charges/s over 1,000 scopes, 8 clients, against the bare insert of the entry",
		oneOf(1000), entry{"metered", chargeMetered}, entry{"floor", chargeFloor}),
	rates("charge_bound_vs_floor", atLeast(0.72), boundMeaning, oneOf(1000), entry{"metered", chargeQuiet}, entry{"floor", chargeFloor}),
	rates("charge_vs_counter_row", atLeast(0.70),
		"charges/s over 1,000 scopes, 8 clients, against a counter by hand: UPDATE where it fits and INSERT, in one function; no windows",
		oneOf(1000), entry{"metered", chargeMetered}, entry{"counter", chargeCounter}),
	rates("charge_bound_vs_counter_row", atLeast(0.85), boundMeaning, oneOf(1000), entry{"metered", chargeQuiet}, entry{"counter", chargeCounter}),
	costs("v1_charge_vs_rows", atMost(1.1), "a charge by v1_charge, for other languages, against one by the function of rows and keys that Go calls",
		oneOf(50), entry{"v1_charge", chargeSQL(chargeV1SQL)}, entry{"charge", chargeSQL(chargeRowsSQL)}),
	costs("multi_scope_8_vs_1", atMost(3), "one call that charges 8 scopes against one that charges 1",
		inTurn(1000), entry{"8 scopes", chargeMany(8)}, entry{"1 scope", chargeMany(1)}),
}

// inTurn returns n scopes, one after the other.
func inTurn(n int) func() string {
	next := 0
	return func() string { next++; return scopeName(next % n) }
}

// chargeMany charges n scopes in one call.
func chargeMany(n int) func(*kit) contender {
	return func(k *kit) contender {
		return k.does("", func(ctx context.Context) error { return k.charge(ctx, units(n, k.scope)...) })
	}
}
