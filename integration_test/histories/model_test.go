package main

import (
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"
)

// The judge finds each of the losses that it is there for.
func TestModel_FindsContradictions(t *testing.T) {
	t.Parallel()
	one := func(in call, out answer, from, to int64) porcupine.Operation {
		return porcupine.Operation{Input: in, Output: out, Call: from, Return: to}
	}
	ten := func(kind string, refused bool, from, to int64) porcupine.Operation {
		return one(call{Kind: kind, Amount: 6, Limit: 10}, answer{Refused: refused}, from, to)
	}
	usage := func(units, from, to int64) porcupine.Operation {
		return one(call{Kind: "usage"}, answer{Units: units}, from, to)
	}
	for what, test := range map[string]struct {
		ops  []porcupine.Operation
		want porcupine.CheckResult
	}{
		"two charges, one of them refused":     {[]porcupine.Operation{ten("charge", false, 1, 4), ten("charge", true, 2, 3), usage(6, 5, 6)}, porcupine.Ok},
		"a command beyond the limit":           {[]porcupine.Operation{ten("charge", false, 1, 2), ten("command", false, 3, 4)}, porcupine.Illegal},
		"a session beyond the limit":           {[]porcupine.Operation{ten("session", false, 1, 2), ten("session", false, 3, 4)}, porcupine.Illegal},
		"a session behind a hold":              {[]porcupine.Operation{ten("session", true, 1, 2), usage(0, 3, 4)}, porcupine.Ok},
		"an over-commit":                       {[]porcupine.Operation{ten("charge", false, 1, 4), ten("charge", false, 2, 3)}, porcupine.Illegal},
		"a charge that is lost":                {[]porcupine.Operation{ten("charge", false, 1, 2), usage(0, 3, 4)}, porcupine.Illegal},
		"a charge that counts twice":           {[]porcupine.Operation{ten("charge", false, 1, 2), usage(12, 3, 4)}, porcupine.Illegal},
		"a refusal though there is room":       {[]porcupine.Operation{ten("charge", true, 1, 2)}, porcupine.Illegal},
		"a reading that goes back":             {[]porcupine.Operation{ten("charge", false, 1, 9), usage(6, 2, 3), usage(0, 4, 5)}, porcupine.Illegal},
		"an unknown outcome that is read late": {[]porcupine.Operation{ten("charge", false, 1, 99), usage(0, 2, 3), usage(6, 4, 5)}, porcupine.Ok},
		"a hold that is captured and released": {[]porcupine.Operation{one(call{Kind: "place"}, answer{}, 1, 2), one(call{Kind: "capture"}, answer{}, 3, 6), one(call{Kind: "release"}, answer{}, 4, 5)}, porcupine.Illegal},
		"a claim with two holders":             {[]porcupine.Operation{one(call{Kind: "claim", Who: "a"}, answer{}, 1, 3), one(call{Kind: "claim", Who: "b"}, answer{}, 2, 4)}, porcupine.Illegal},
		"an operation that runs twice":         {[]porcupine.Operation{one(call{Kind: "do", Who: "a"}, answer{State: "a"}, 1, 3), one(call{Kind: "do", Who: "b"}, answer{State: "b"}, 2, 4)}, porcupine.Illegal},
		"a token that is redeemed when used":   {[]porcupine.Operation{one(call{Kind: "consume"}, answer{}, 1, 2), one(call{Kind: "redeem"}, answer{}, 3, 4)}, porcupine.Illegal},
		"a token that is used twice":           {[]porcupine.Operation{one(call{Kind: "consume"}, answer{}, 1, 3), one(call{Kind: "consume"}, answer{}, 2, 4)}, porcupine.Illegal},
	} {
		require.Equal(t, test.want, porcupine.CheckOperationsTimeout(model, test.ops, time.Minute), what)
	}
}
