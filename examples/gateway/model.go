package main

import (
	"encoding/json"
	"hash/fnv"
	"net/http"
	"strings"
	"sync"
	"time"
)

// model is a stand-in for the server of a language model. It streams words, a token each, and counts them. The
// gateway names a generation by X-Request-Id, and can cancel it. Its stream then ends as any other does, with an
// event that has the final count.
//
//	POST /v1/chat/completions
//	POST /v1/chat/completions/{id}/cancel
type model struct {
	pace time.Duration // between tokens

	mu          sync.Mutex
	generations map[string]*generation
}

// generation is the model's record of one.
type generation struct {
	Usage  usage
	Finish string // stop, length, cancelled; broken: the model failed; lost: whoever read it has gone; "" while it goes on

	once sync.Once
	stop chan struct{}
}

func newModel(pace time.Duration) *model {
	return &model{pace: pace, generations: map[string]*generation{}}
}

func (m *model) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", m.complete)
	mux.HandleFunc("POST /v1/chat/completions/{id}/cancel", func(_ http.ResponseWriter, r *http.Request) {
		m.mu.Lock()
		defer m.mu.Unlock()
		if g := m.generations[r.PathValue("id")]; g != nil {
			g.once.Do(func() { close(g.stop) })
		}
	})
	return mux
}

func (m *model) complete(w http.ResponseWriter, r *http.Request) {
	var request chat
	id := r.Header.Get("X-Request-Id")
	if err := json.NewDecoder(r.Body).Decode(&request); err != nil || id == "" {
		http.Error(w, "want a chat, and X-Request-Id", http.StatusBadRequest)
		return
	}
	prompt := ""
	for _, msg := range request.Messages {
		prompt += msg.Content + " "
	}
	g := &generation{Usage: usage{Prompt: int64(len(strings.Fields(prompt)))}, stop: make(chan struct{})}
	m.mu.Lock()
	_, repeated := m.generations[id]
	if !repeated {
		m.generations[id] = g
	}
	m.mu.Unlock()
	if repeated {
		http.Error(w, "the id was used before", http.StatusConflict)
		return
	}
	m.stream(w, r, id, g, prompt, request.MaxTokens)
}

var words = strings.Fields("the cost of a stream is known when it ends so hold what it may cost and take what it did")

// stream sends the tokens, and then the event that says why there are no more.
func (m *model) stream(w http.ResponseWriter, r *http.Request, id string, g *generation, prompt string, most int64) {
	length := lengthOf(prompt)
	finish := ""
	for u := g.Usage; finish == ""; {
		select {
		case <-g.stop:
			finish = "cancelled"
			continue
		case <-r.Context().Done():
			finish = "lost"
			continue
		case <-time.After(m.pace):
		}
		switch {
		case u.Completion == length:
			finish = "stop"
		case u.Completion == most:
			finish = "length"
		case u.Completion == length/2 && strings.Contains(prompt, "BREAK"):
			finish = "broken"
		default:
			word := words[int(u.Completion)%len(words)] + " "
			u.Completion++
			if err := sendEvent(w, newChunk(id, word, "", u)); err != nil {
				finish = "lost"
				continue
			}
			m.mu.Lock()
			g.Usage = u
			m.mu.Unlock()
		}
	}
	m.mu.Lock()
	g.Finish = finish
	u := g.Usage
	m.mu.Unlock()
	if finish == "broken" {
		panic(http.ErrAbortHandler)
	}
	_ = sendEvent(w, newChunk(id, "", finish, u)) // whoever does not hear it has gone
	_ = sendEvent(w, done)
}

// lengthOf is how long the answer to a prompt is, if nobody cuts it.
func lengthOf(prompt string) int64 {
	hash := fnv.New32a()
	_, _ = hash.Write([]byte(prompt))
	return 20 + int64(hash.Sum32()%60)
}
