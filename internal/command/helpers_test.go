package command_test

import (
	"time"

	"github.com/pgmetered/metered/internal/pgtest"
)

type (
	uploaded = pgtest.Uploaded
	process  = pgtest.Process
)

var (
	isolationLevels = pgtest.IsolationLevels
	errOwn          = pgtest.ErrOwn
	nothing         = pgtest.Nothing
	everything      = pgtest.Everything

	setUp     = pgtest.SetUp
	newClient = pgtest.NewClient
	onWire    = pgtest.OnWire

	mint         = pgtest.Mint
	unknownToken = pgtest.UnknownToken
	redeem       = pgtest.Redeem
	charge       = pgtest.Charge
	room         = pgtest.Room
	fill         = pgtest.Fill
	upload       = pgtest.Upload
	mustNotRun   = pgtest.MustNotRun
	whole        = pgtest.Whole
	wholeFunc    = pgtest.WholeFunc

	used        = pgtest.Used
	count       = pgtest.Count
	footprintOf = pgtest.FootprintOf

	lockScope = pgtest.LockScope
	atOnce    = pgtest.AtOnce
)

const wholeSteps = pgtest.WholeSteps

var monday = time.Date(2031, 5, 5, 12, 0, 0, 0, time.UTC)
