package holds

import (
	"errors"
	"fmt"
	"strings"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
)

func checkNames(tenant, holder string, ids ...string) error {
	if err := checkText("Tenant", tenant); err != nil {
		return err
	}
	if err := checkText("Holder", holder); err != nil {
		return err
	}
	for _, id := range ids {
		if id == "" {
			return invalid("ID", "is empty")
		}
		if err := checkText("ID", id); err != nil {
			return err
		}
	}
	return nil
}

// checkIDs validates the ids of a call on several holds.
func checkIDs(tenant, holder string, ids []string) error {
	if len(ids) == 0 || len(ids) > bounds.MaxHolds {
		return invalid("IDs", "are %d, want 1 to %d", len(ids), bounds.MaxHolds)
	}
	seen := make(map[string]bool, len(ids))
	for i, id := range ids {
		if seen[id] {
			return invalid(index("IDs", i, ""), "%q is there twice", id)
		}
		seen[id] = true
	}
	return checkNames(tenant, holder, ids...)
}

// holdIDs encodes ids for the SQL functions.
func holdIDs(tenant, holder string, ids []string) ledger.HoldIDs {
	h := ledger.HoldIDs{Tenant: tenant, Holder: holder, IDs: ids}
	for _, id := range ids {
		h.Issued = append(h.Issued, issuedAt(id))
	}
	return h
}

// required refuses a call that names no holder, where Config demands one.
func (b *Book) required(field, holder string) error {
	if b.cfg.RequireHolder && holder == "" {
		return invalid(field, "is empty, and Config.RequireHolder is set")
	}
	return nil
}

// anyHolder is the book without Config.RequireHolder, for the program's own workers.
func (b *Book) anyHolder() *Book {
	if b == nil || !b.cfg.RequireHolder {
		return b
	}
	other := *b
	other.cfg.RequireHolder = false
	return &other
}

func (b *Book) checkNote(field string, note budget.Note) error {
	if b.cfg.RequireActor && note.Actor == "" {
		return invalid(field+".Actor", "is empty, and Config.RequireActor is set")
	}
	for _, f := range []struct{ name, text string }{
		{".Actor", note.Actor}, {".Tenant", note.Tenant}, {".Correlation", note.Correlation},
		{".Reason", note.Reason},
	} {
		if err := checkText(field+f.name, f.text); err != nil {
			return err
		}
	}
	return nil
}

// renamed replaces the ledger's name of an argument, charges or charges[i], by the caller's.
func renamed(err error, all string, each func(i int) string) error {
	var a *budget.ArgumentError
	if !errors.As(err, &a) {
		return err
	}
	var i int
	if _, scanErr := fmt.Sscanf(a.Field, "charges[%d]", &i); scanErr != nil {
		return invalid(all, "%s", a.Reason)
	}
	_, field, _ := strings.Cut(a.Field, "]")
	return invalid(each(i)+field, "%s", a.Reason)
}

// notNil refuses an argument that is nil, or an interface with a nil pointer in it.
func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

// checkText refuses a text that is too long, or that Postgres cannot store.
func checkText(field, text string) error {
	return fault.Text(errArgument, field, text, bounds.MaxIDBytes)
}
