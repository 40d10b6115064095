package main

import (
	"fmt"
	"time"

	"github.com/schollz/progressbar/v3"
)

// progressEvery is the pause between reports of progress without a terminal.
const progressEvery = 10 * time.Second

// progress tells on the standard error how far something is: by a bar on a terminal, else by a line
// from time to time.
type progress struct {
	a    *app
	what string
	bar  *progressbar.ProgressBar
	last time.Time
}

// progress begins a report. total is about how much there is to do, -1 if that is not known.
func (a *app) progress(what string, total int64) *progress {
	p := &progress{a: a, what: what, last: time.Now()}
	if _, _, ok := terminal(a.err); ok {
		p.bar = progressbar.NewOptions64(total, progressbar.OptionSetWriter(a.err),
			progressbar.OptionSetDescription(what),
			progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionShowCount(),
			progressbar.OptionClearOnFinish(),
			progressbar.OptionSetPredictTime(true))
	}
	return p
}

// at says that so much of it is done.
func (p *progress) at(done int64) {
	switch {
	case p.bar != nil:
		if total := p.bar.GetMax64(); total > 0 && done >= total {
			p.bar.ChangeMax64(done + done/10 + 1) // it was an estimate
		}
		_ = p.bar.Set64(done)
	case time.Since(p.last) > progressEvery:
		p.last = time.Now()
		fmt.Fprintf(p.a.err, "%s: %d\n", p.what, done)
	}
}

func (p *progress) end() {
	if p.bar != nil {
		_ = p.bar.Finish()
		_ = p.bar.Clear()
	}
}
