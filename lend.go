package metered

import (
	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/tokens"
)

type (
	charging  = ledger.Charging[budget.Receipt]
	entryCall = ledger.Call[budget.Posted]
	holdsCall = ledger.Call[[]holds.Hold]
)

// What the packages lend that a command is made of.
var (
	prepareCharges = lend.Charges.(func(*budget.Ledger, ...budget.Charge) (*charging, error))
	prepareCredit  = lend.Credit.(func(*budget.Ledger, budget.Credit) (*entryCall, error))
	prepareRefund  = lend.Refund.(func(*budget.Ledger, budget.Refund) (*entryCall, error))

	placeHold    = lend.PlaceHold.(func(*holds.Book, holds.Request) (*holdsCall, error))
	claimHold    = lend.ClaimHold.(func(*holds.Book, holds.Claim) (*holdsCall, error))
	captureHolds = lend.CaptureHolds.(func(*holds.Book, holds.Capture) (*holdsCall, error))
	releaseHolds = lend.ReleaseHolds.(func(*holds.Book, holds.Release) (*holdsCall, error))
	extendHolds  = lend.ExtendHolds.(func(*holds.Book, holds.Extend) (*holdsCall, error))
	refundHolds  = lend.RefundHolds.(func(*holds.Book, holds.Refund) (*holdsCall, error))
	decodeHold   = lend.DecodeHold.(func([]byte) (holds.Hold, error))

	scanLSN = lend.ScanLSN.(func(pgx.Row) (replica.LSN, error))

	presentToken = lend.Present.(func(store *tokens.Store, purpose, subject, text string) (ledger.PresentedToken, error))
	grantOf      = lend.Grant.(func(ledger.PresentedToken, ledger.TokenRow) (tokens.Grant, error))
)
