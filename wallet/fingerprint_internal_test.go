package wallet

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// A reference in a database stands for what it stood for when it was written, by this build or by one whose grants had a field
// for each kind of end. The last build that had the fields wrote the hashes.
func TestFingerprint_OfAReferenceIsAsItWasWritten(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 21, 13, 0, 0, 1500, time.FixedZone("", 3600))
	month := budget.Per(1, budget.Month, time.UTC, time.Time{}).Period
	days := budget.PerPeriod(1, 48*time.Hour, at).Period
	ten := 10
	for _, c := range []struct {
		g             Grant
		grant, change string
	}{
		{Grant{}, "012f5a18ad234987b243ef01bae504989a6b4db0cf405c4d5e93332792111cfa78", "01b78b627451d5a561dabdd56471688bcc5b1f9021ca37081f9d355d208f4f3f76"},
		{Grant{Ends: At(at), Category: "paid", Priority: &ten},
			"01c4e819def06953a5a3557b5fcf747ddb845ec7b094894ed3289593aaa3b7ce23", "017a32a1387fca9c2a271218c978c1e810bd99843732a330c4d3dbafda71db061d"},
		{Grant{Ends: After(time.Hour), LateRefunds: Lapse, Roll: &Roll{Cap: 7}},
			"01ec685e512664ff4f8f995d724656cc53d5fb0f77238109e7af2ae63c995ee542", "011ca29b1bcaa0f4d8ff5247cd9a4cf77d01264d111e811098b08388d1353ee3a8"},
		{Grant{Ends: After(time.Hour), Roll: &Roll{Cap: 7, Lasts: For(24 * time.Hour)}},
			"01b52ab9123a1d721b59e81e13978479619bf2168c7c6bd89986666a00b7e84bc0", "019e24e38eef9073b721368ce6993cd6cb165d80695565a671291b39b56490687a"},
		{Grant{Ends: At(at), Roll: &Roll{Cap: 7, Lasts: For(24 * time.Hour), Times: -1, Shared: true}},
			"022a6cdc0fc94c3e9cb3199cc8a713938271016cd7ba4a408c783753d17b126d66", "01d15dbe6ef16a068265008c62d74703a5193c240bba86e6252f931f75836bf8f8"},
		{Grant{Ends: At(at), Roll: &Roll{Cap: 7, Lasts: ToEndOf(month), Times: 3}},
			"02adb5b2ea0e15a4800e521a3d514b4ddd15108a412b2c490ad37cb8f277b20464", "01f36f8f00b2fdd790fe80820110aad42a2c058dfb4c06f2ba35fd222819d71832"},
		{Grant{Starts: at, Ends: After(time.Hour), Uses: []string{"b", "a", "b"}},
			"02aac3d248d6d89648257f10c1f29ac699333620ed8410b39a9eaa351c51f76ea3", "0125bd2b39df4f5e6352590bf71fe45845cd311fd801cd5273e36186f7455008b1"},
		{Grant{Ends: EachPeriod(month)}, "023fc523194077655f067a22c9e56889b6a31706fd0ef06bc320aa85b17d015747", "0120cc73cb7f2d8e4877b73e655ba4ab9ed5f5c2f5d94394cadaccd8067ce40231"},
		{Grant{Ends: EachPeriodProrated(days), Starts: at},
			"026c686e151bede0ddb03781497ae9f248a1301ae4d45aeb2b7f52b22ca0295c2b", "0186a2602e7798acd39479d67d97c14a9ed7c8962fffe455332d8cde9d66c40e0f"},
		{Grant{Ends: EachPeriodWithFirst(month, 5), Roll: &Roll{Cap: 1, Lasts: ToEndOf(days), Shared: true}},
			"0280380745541c9a32844e5da600e7318e1d387ba1f27dd5e2833164e4f294bd6b", "01ee7ef43e7443c48a085cfa843038973a43214a68787fd91542eaec4b67e0aba4"},
		{Grant{Ends: EachPeriodWithFirst(month, 0)}, "023cf445b7cc77581dd03068d92047cf72f2bf6d897b028b9e9bcdcc76e1d46acf", "01589e1b0f45b893a74702c8c40a868b349fbaa747d1426174a779156db593a878"},
	} {
		c.g.Wallet, c.g.Amount, c.g.Reference = "ann", 300, "r"
		require.Equal(t, c.grant, fmt.Sprintf("%x", c.g.fingerprint()), "%+v", c.g)
		change := Change{Wallet: "ann", Reference: "c", Plan: "p", To: &c.g}
		require.Equal(t, c.change, fmt.Sprintf("%x", change.fingerprint()), "%+v", c.g)

		// A grant that a queue keeps as JSON is the same grant.
		kept, err := json.Marshal(c.g)
		require.NoError(t, err)
		var read Grant
		require.NoError(t, json.Unmarshal(kept, &read))
		require.Equal(t, c.grant, fmt.Sprintf("%x", read.fingerprint()), "%s", kept)
	}
	for _, text := range []string{`{"kind":"soon"}`, `{"kind":"each_period_with_first"}`, `7`} {
		require.Error(t, json.Unmarshal([]byte(text), &Ends{}), text)
	}
	for _, text := range []string{`{"kind":"at"}`, `7`} {
		require.Error(t, json.Unmarshal([]byte(text), &Span{}), text)
	}
}
