package holds

import (
	"time"

	"github.com/pgmetered/metered/internal/ledger"
)

// untilTheJobEnds is the time after which a job's hold falls due by itself: the job's end ends it.
const untilTheJobEnds = 3650 * 24 * time.Hour

// preparePark validates the request of a job that waits until it fits.
func (b *Book) preparePark(r Placement) (*ledger.Parking, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	if len(r.Lines)+len(r.Charges) == 0 {
		return nil, invalid("Placement.Lines", "and Charges are none")
	}
	ttl, lifetime := r.TTL, b.lifetime()
	if ttl == 0 {
		ttl, lifetime, r.TTL = untilTheJobEnds, 0, b.cfg.MaxTTL
	}
	r.ID = "job"
	priced, err := b.check(&r)
	if err != nil {
		return nil, err
	}
	if len(priced.Queries) > 0 {
		return nil, invalid("Placement.Lines",
			"have a limit with MaxFrom: a parked job asks jobs.Config.Limits")
	}
	priced.Charges = ledger.Silent(priced.Charges)
	hold := ledger.NewHold{
		Tenant: r.Tenant, ID: r.ID, Holder: r.ID, Fingerprint: r.fingerprint(priced.Charges),
		TTL: ttl, Grace: r.Grace, Lifetime: lifetime, Metadata: string(r.Metadata), Minimum: minima(r.Lines),
	}
	return &ledger.Parking{Charging: priced.Charging, Hold: hold.String(), Channel: b.channel()}, nil
}
