package main

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"
)

// The wire format is the usual one of a chat completion, between clients and gateway as between gateway and model.

// chat is a request. A client may leave MaxTokens out.
type chat struct {
	Model     string    `json:"model"`
	Messages  []message `json:"messages"`
	MaxTokens int64     `json:"max_tokens"`
	Stream    bool      `json:"stream"`
}

type message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// chunk is an event of a stream. Each has the usage so far, and the last one says why there are no more.
type chunk struct {
	ID      string   `json:"id"`
	Choices []choice `json:"choices"`
	Usage   usage    `json:"usage"`
}

type choice struct {
	Delta        delta  `json:"delta"`
	FinishReason string `json:"finish_reason,omitempty"`
}

type delta struct {
	Content string `json:"content,omitempty"`
}

type usage struct {
	Prompt     int64 `json:"prompt_tokens"`
	Completion int64 `json:"completion_tokens"`
}

func newChunk(id, text, finish string, u usage) chunk {
	return chunk{ID: id, Choices: []choice{{delta{text}, finish}}, Usage: u}
}

const done = "[DONE]"

// writeTimeout is how long a peer may take to read an event.
const writeTimeout = 10 * time.Second

// sendEvent sends an event: a string as it is, anything else as JSON. The error is that of a peer who has gone.
func sendEvent(w http.ResponseWriter, event any) error {
	text, ok := event.(string)
	if !ok {
		body, err := json.Marshal(event)
		if err != nil {
			return err
		}
		text = string(body)
	}
	w.Header().Set("Content-Type", "text/event-stream")
	control := http.NewResponseController(w)
	_ = control.SetWriteDeadline(time.Now().Add(writeTimeout))
	if _, err := fmt.Fprintf(w, "data: %s\n\n", text); err != nil {
		return err
	}
	return control.Flush()
}

// eachEvent calls f with the events of a stream, up to its end. A stream that breaks off is io.ErrUnexpectedEOF.
func eachEvent(stream io.Reader, f func(data []byte) error) error {
	lines := bufio.NewScanner(stream)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		switch {
		case !ok:
			continue
		case string(data) == done:
			return nil
		}
		if err := f(data); err != nil {
			return err
		}
	}
	return cmp.Or(lines.Err(), io.ErrUnexpectedEOF)
}
