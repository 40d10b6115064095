package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/httpmetered"
)

var errModel = &httpmetered.Problem{Status: http.StatusBadGateway, Detail: "the model does not answer"}

// relay has the model generate, and passes its stream on. When the client hangs up or does not read, or the session
// ends, it stops the model, and reads on to the event with the final count. So the model's own count is settled. If
// the model breaks off, its last count is. An error means that nothing was generated.
func (g *gateway) relay(session context.Context, w http.ResponseWriter, r *http.Request, request chat) (completion, error) {
	ctx, end := context.WithCancel(context.WithoutCancel(session))
	defer end()
	body, err := json.Marshal(request)
	if err != nil {
		return completion{}, err
	}
	ask, err := http.NewRequestWithContext(ctx, http.MethodPost, g.cfg.model+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return completion{}, err
	}
	got := completion{Generation: metered.NewID()}
	ask.Header.Set("X-Request-Id", got.Generation)
	res, err := g.http.Do(ask)
	if err != nil {
		return completion{}, fmt.Errorf("%w: %w", errModel, err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return completion{}, fmt.Errorf("%w: %s", errModel, res.Status)
	}
	leaving, leave := context.WithCancel(session)
	defer context.AfterFunc(r.Context(), leave)()
	stopped := context.AfterFunc(leaving, func() {
		g.stop(ctx, got.Generation)
		time.AfterFunc(stopTimeout, end)
	})
	defer leave()
	defer stopped()

	var text strings.Builder
	err = eachEvent(res.Body, func(data []byte) error {
		var c chunk
		if err := json.Unmarshal(data, &c); err != nil || len(c.Choices) == 0 {
			return errors.Join(errModel, err)
		}
		got.Usage = c.Usage
		if got.Finish = c.Choices[0].FinishReason; got.Finish != "" {
			return nil // it is sent once it is settled
		}
		text.WriteString(c.Choices[0].Delta.Content)
		if sendEvent(w, c) != nil {
			leave()
		}
		return nil
	})
	got.Text = text.String()
	if err != nil && got.Usage == (usage{}) {
		return completion{}, fmt.Errorf("%w: %w", errModel, err)
	}
	got.Finish = cmp.Or(got.Finish, "broken")
	return got, nil
}

// stopTimeout is how long the model may take to end a generation.
const stopTimeout = 10 * time.Second

// stop has the model end a generation. If the model does not hear it, the generation goes on to its end, and is paid for.
func (g *gateway) stop(ctx context.Context, generation string) {
	ask, err := http.NewRequestWithContext(ctx, http.MethodPost, g.cfg.model+"/v1/chat/completions/"+generation+"/cancel", nil)
	if err != nil {
		return
	}
	if res, err := g.http.Do(ask); err == nil {
		res.Body.Close()
	}
}
