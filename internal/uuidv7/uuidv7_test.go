package uuidv7_test

import (
	"encoding/hex"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/uuidv7"
)

func TestTime_IsThatOfEachSpelling(t *testing.T) {
	t.Parallel()
	before := time.Now().Truncate(time.Millisecond)
	id := uuidv7.New()
	bare := strings.ReplaceAll(id, "-", "")
	for _, spelling := range []string{
		id, bare, strings.ToUpper(id), strings.ToUpper(bare),
		"{" + id + "}", "{" + bare + "}", "urn:uuid:" + id, "URN:UUID:" + strings.ToUpper(id), "urn:uuid:" + bare,
	} {
		at := uuidv7.Time(spelling)
		require.NotNil(t, at, spelling)
		require.False(t, at.Before(before), spelling)
		require.False(t, at.After(time.Now()), spelling)
	}
	for _, other := range []string{
		"", "-", "{}", "{" + id, id + "}", "urn:uuid:", "urn:uuid:{" + id + "}", "{urn:uuid:" + id + "}", id + " ", id[1:], bare[1:],
		id[:8] + "_" + id[9:], id[:9] + "-" + id[10:], id[:14] + "4" + id[15:], bare[:12] + "4" + bare[13:], bare[:16] + "c" + bare[17:],
	} {
		require.Nil(t, uuidv7.Time(other), other)
	}
}

func TestTimeOfShort_IsThatOfNewShortAlone(t *testing.T) {
	t.Parallel()
	before := time.Now().Truncate(time.Millisecond)
	id := uuidv7.NewShort()
	require.Len(t, id, 16)
	at := uuidv7.TimeOfShort(id)
	require.NotNil(t, at)
	require.False(t, at.Before(before))
	require.False(t, at.After(time.Now()))
	require.Nil(t, uuidv7.Time(id), "a caller's id of 16 characters may be anything")
	for _, other := range []string{"", id[1:], id + "A", uuidv7.New(), "*" + id[1:], id[:8] + "A" + id[9:], id[:10] + "AAA" + id[13:], "\n" + id[1:]} {
		require.Nil(t, uuidv7.TimeOfShort(other), other)
	}
}

// 74 bits of it, each of which is 0 in some id and 1 in another.
func TestNew_IsRandomButForTimeVersionAndVariant(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	var zeros, ones [16]byte
	for range 1000 {
		id := uuidv7.New()
		require.False(t, seen[id], id)
		seen[id] = true
		b, err := hex.DecodeString(strings.ReplaceAll(id, "-", ""))
		require.NoError(t, err)
		for i := range b {
			zeros[i] |= ^b[i]
			ones[i] |= b[i]
		}
	}
	for i, random := range map[int]byte{6: 0x0f, 7: 0xff, 8: 0x3f, 9: 0xff, 10: 0xff, 11: 0xff, 12: 0xff, 13: 0xff, 14: 0xff, 15: 0xff} {
		require.Equal(t, random, zeros[i]&ones[i], "byte %d", i)
	}
}

// One that has hyphens says that it is a UUID, one that has none has to look like one.
func TestTime_WithoutHyphensIsOneThatCanBe(t *testing.T) {
	t.Parallel()
	for at, can := range map[time.Time]bool{
		time.Now(): true, time.Now().Add(-time.Hour): true, time.Now().Add(time.Hour): true,
		time.Date(2025, 1, 1, 0, 0, 0, 0, time.UTC): true, time.Date(2024, 12, 31, 23, 59, 59, 0, time.UTC): false,
		time.Now().Add(25 * time.Hour): false, time.Now().AddDate(1000, 0, 0): false,
	} {
		ms := at.UnixMilli()
		bare := hex.EncodeToString([]byte{byte(ms >> 40), byte(ms >> 32), byte(ms >> 24), byte(ms >> 16), byte(ms >> 8), byte(ms),
			0x70, 0, 0x80, 0, 0, 0, 0, 0, 0, 0})
		require.Equal(t, can, uuidv7.Time(bare) != nil, at)
		require.NotNil(t, uuidv7.Time(bare[:8]+"-"+bare[8:12]+"-"+bare[12:16]+"-"+bare[16:20]+"-"+bare[20:]), at)
	}
}
