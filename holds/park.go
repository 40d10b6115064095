package holds

import (
	"cmp"

	"github.com/pgmetered/metered/internal/ledger"
)

// preparePark validates the request of a job that waits until it fits.
func (b *Book) preparePark(r Request) (*ledger.Parking, error) {
	if err := b.made(); err != nil {
		return nil, err
	}
	switch {
	case r.ID != "" || r.Holder != "":
		return nil, invalid("Request.ID", "and Holder: the job's are taken")
	case len(r.Lines)+len(r.Charges) == 0:
		return nil, invalid("Request.Lines", "and Charges are none")
	}
	r.ID, r.TTL = "job", cmp.Or(r.TTL, b.cfg.MaxTTL)
	priced, err := b.check(&r)
	if err != nil {
		return nil, err
	}
	switch {
	case len(priced.Queries) > 0:
		return nil, invalid("Request.Lines", "have a limit with MaxFrom: a parked job asks jobs.Config.Limits")
	case ledger.Tells(priced.Charges):
		return nil, invalid("Request.Lines", "have a limit with Thresholds: a parked job cannot report them")
	}
	hold := ledger.NewHold{
		Tenant: r.Tenant, ID: r.ID, Holder: r.ID, Fingerprint: r.fingerprint(priced.Charges),
		TTL: r.TTL, Grace: r.Grace, Lifetime: b.lifetime(), Metadata: string(r.Metadata), Minimum: minima(r.Lines),
	}
	return &ledger.Parking{Charging: priced.Charging, Hold: hold.String(), Channel: b.channel()}, nil
}
