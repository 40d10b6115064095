package pgtest

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Grants renders several sets of grants, for AsRole.
func Grants(sets ...func(schema, role string) (string, error)) func(schema, role string) (string, error) {
	return func(schema, role string) (all string, err error) {
		for _, render := range sets {
			text, err := render(schema, role)
			if err != nil {
				return "", err
			}
			all += text
		}
		return all, nil
	}
}

// AsRole returns a pool on the same database whose sessions act as a new role. It has the grants of
// render, as of metered.GrantSQL, and those of more, where $role stands for its name, and nothing
// else. The role goes when the test ends.
func AsRole(t testing.TB, owner *pgxpool.Pool, render func(schema, role string) (string, error), more string) *pgxpool.Pool {
	t.Helper()
	ctx := context.Background()
	var role string
	if err := owner.QueryRow(ctx, "select 'role_' || md5(random()::text)").Scan(&role); err != nil {
		t.Fatalf("pgtest: naming a role: %v", err)
	}
	quoted := pgx.Identifier{role}.Sanitize()
	grants := "create role " + quoted + ";"
	if render != nil {
		text, err := render("metered", role)
		if err != nil {
			t.Fatalf("pgtest: granting: %v", err)
		}
		grants += text + ";"
	}
	grants += strings.ReplaceAll(more, "$role", quoted)
	if _, err := owner.Exec(ctx, grants, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatalf("pgtest: making a role: %v", err)
	}
	config := owner.Config().Copy()
	config.ConnConfig.RuntimeParams["role"] = role
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatalf("pgtest: connecting as a role: %v", err)
	}
	t.Cleanup(func() {
		pool.Close()
		if _, err := owner.Exec(ctx, "drop owned by "+quoted+"; drop role "+quoted, pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Errorf("pgtest: dropping a role: %v", err)
		}
	})
	return pool
}
