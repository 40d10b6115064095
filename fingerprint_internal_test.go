package metered

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lockkey"
)

func fingerprintOf(t testing.TB, cmd Command, token *ledger.PresentedToken) string {
	t.Helper()
	if token == nil {
		token = &ledger.PresentedToken{}
	}
	fp, err := fingerprint(cmd, *token, nil)
	require.NoError(t, err)
	require.Len(t, fp, 1+sha256.Size)
	return hex.EncodeToString(fp)
}

// A later release compares a stored fingerprint with its own of the same command: these must never change, unless
// fingerprintVersion does.
func TestFingerprint_Golden(t *testing.T) {
	t.Parallel()
	at := time.Date(2031, 5, 6, 12, 0, 0, 123457999, time.UTC)
	token := &ledger.PresentedToken{Digest: append([]byte{1, 2, 3}, make([]byte, 29)...), Purpose: "upload", Subject: "ann"}
	for _, v := range []struct {
		cmd   Command
		token *ledger.PresentedToken
		want  string
	}{
		{Command{ID: "a"}, nil, "0117b0761f87b081d5cf10757ccc89f12be355c70e2e29df288b65b30710dcbcd1"},
		{Command{ID: "b", Tenant: "ns"}, nil, "0117b0761f87b081d5cf10757ccc89f12be355c70e2e29df288b65b30710dcbcd1"},
		{Command{Name: "upload", Input: map[string]any{"b": 1, "a": "é"}}, nil, "016125c203fc193849b70e59ea5411beb9fb95194bcbcc9801be4edcab09f34458"},
		{Command{Input: []byte(`{"a":"é","b":1}`)}, nil, "0175195f30769f12eac1157e43942963e95bb6e124b501edf5deb7266b532d09a4"},
		{Command{IssuedAt: at}, nil, "01871651a6da4ee7d2cc2df425f8757704bb92fb2ae40ddc34684b7119350518de"},
		{Command{}, token, "01258dd51ceefb0c57d252e9d35e4b4a3fd5d1b203423bdc5e6c31cc2be2034f48"},
		{Command{
			Name: "upload", Input: 7, IssuedAt: at,
			Charges: []budget.Charge{{Scope: "org/acme", Amount: 1200, Limits: []budget.Limit{budget.Lifetime(1)}}, {Scope: "é", Amount: 1 << 53}},
			Sticky:  []budget.Charge{{Scope: "tries", Amount: 1}},
		}, token, "010038698687b02708ad56b823e4c394659163e45b4375d163528afad829c752a2"},
	} {
		require.Equal(t, v.want, fingerprintOf(t, v.cmd, v.token), "%+v", v.cmd)
	}
}

func FuzzFingerprint(f *testing.F) {
	f.Add("", []byte(""), "", int64(1), int64(0), "", []byte(""), "", int64(1), int64(1))
	f.Add("ab", []byte("c"), "s", int64(1), int64(0), "a", []byte("bc"), "s", int64(1), int64(0))
	f.Add("", []byte("\x00\x00\x00\x00\x00\x00\x00\x00"), "s", int64(1), int64(2), "", []byte(""), "s", int64(1), int64(2))
	f.Add("n", []byte("i"), "s", int64(1), int64(-1), "n", []byte("i"), "s", int64(1), int64(0))
	f.Fuzz(func(t *testing.T, name1 string, in1 []byte, scope1 string, amount1, issued1 int64,
		name2 string, in2 []byte, scope2 string, amount2, issued2 int64) {
		build := func(name string, in []byte, scope string, amount, issued int64) (Command, *ledger.PresentedToken) {
			cmd := Command{Name: name, Input: in}
			if issued >= 0 && issued < 1<<60 { // negative: none
				cmd.IssuedAt = time.UnixMicro(issued)
			}
			if amount != 0 {
				cmd.Charges = []budget.Charge{{Scope: scope, Amount: amount}}
			}
			if amount%2 == 0 {
				return cmd, nil
			}
			return cmd, &ledger.PresentedToken{Digest: make([]byte, 32), Purpose: scope, Subject: name}
		}
		// Whatever makes two commands differ makes their fingerprints differ.
		cmd1, token1 := build(name1, in1, scope1, amount1, issued1)
		cmd2, token2 := build(name2, in2, scope2, amount2, issued2)
		text := func(cmd Command, token *ledger.PresentedToken) string {
			return fmt.Sprintf("%q %q %v %v %q %+v", cmd.Name, cmd.Input, cmd.IssuedAt.IsZero(), cmd.IssuedAt.UnixMicro(), fmt.Sprintf("%q", fmt.Sprint(cmd.Charges)), token)
		}
		same := text(cmd1, token1) == text(cmd2, token2)
		require.Equal(t, same, fingerprintOf(t, cmd1, token1) == fingerprintOf(t, cmd2, token2))
	})
}

func TestFingerprint_AnOldTimeIsNotNone(t *testing.T) {
	t.Parallel()
	require.NotEqual(t, fingerprintOf(t, Command{}, nil), fingerprintOf(t, Command{IssuedAt: time.UnixMicro(0)}, nil))
}

func TestOperationKey_Golden(t *testing.T) {
	t.Parallel()
	key := func(ns, id string) int64 { return lockkey.OfOperation("metered", ns, id) }
	require.Equal(t, int64(-9165199387468059424), key("ns", "op"))
	require.NotEqual(t, key("a", "b"), key("", "ab"))
	require.NotEqual(t, key("a", "b"), key("ab", ""))
}

func TestIssuedAt_IsReadFromAUUIDOfVersion7(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]int64{
		"017f22e2-79b0-7cc3-98c4-dc0c0c07398f":  1645557742000, // RFC 9562, appendix A.6
		"017F22E2-79B0-7CC3-98C4-DC0C0C07398F":  1645557742000,
		"017f22e2-79b0-4cc3-98c4-dc0c0c07398f":  0, // version 4
		"017f22e2-79b0-7cc3-18c4-dc0c0c07398f":  0, // another variant
		"017f22e279b07cc398c4dc0c0c07398f":      0, // without hyphens, and before 2025
		"017f22e2_79b0_7cc3_98c4_dc0c0c07398f":  0,
		"017f22e2-79b0-7cc3-98c4-dc0c0c07398g":  0,
		"017f22e2-79b0-7cc3-98c4-dc0c0c07398f ": 0,
		"":                                      0,
	} {
		at := issuedAt(Command{ID: id})
		if want == 0 {
			require.Nil(t, at, id)
			continue
		}
		require.Equal(t, want, at.UnixMilli(), id)
	}
	given := time.Now()
	require.True(t, issuedAt(Command{ID: "017f22e2-79b0-7cc3-98c4-dc0c0c07398f", IssuedAt: given}).Equal(time.UnixMilli(0x017f22e279b0)), "all calls with the id have it in common")
}
