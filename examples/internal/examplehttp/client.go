package examplehttp

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/cookiejar"
	"strings"
	"time"
)

// Client is a user of an example. It knows nothing of the library.
type Client struct {
	Base string
	HTTP *http.Client
}

// NewClient has cookies and connections of its own.
func NewClient(base string) *Client {
	jar, _ := cookiejar.New(nil)
	return &Client{base, &http.Client{Jar: jar, Timeout: 30 * time.Second, Transport: &http.Transport{MaxIdleConnsPerHost: 64, IdleConnTimeout: time.Second}}}
}

// Answer is a server's answer.
type Answer struct {
	Status int // 0: none
	Header http.Header
	Body   string // without the line's end
	Err    error  // of a request without an answer
}

// Do sends a request: bytes as they are, nil for none, anything else as JSON. The rest is names and values of header
// fields. Empty ones are left out.
func (c *Client) Do(ctx context.Context, method, path string, body any, fields ...string) Answer {
	raw, is := body.([]byte)
	if !is && body != nil {
		raw, _ = json.Marshal(body)
	}
	r, err := http.NewRequestWithContext(ctx, method, c.Base+path, bytes.NewReader(raw))
	if err != nil {
		return Answer{Err: err}
	}
	for i := 0; i < len(fields); i += 2 {
		if fields[i+1] != "" {
			r.Header.Set(fields[i], fields[i+1])
		}
	}
	response, err := c.HTTP.Do(r)
	if err != nil {
		return Answer{Err: err}
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		return Answer{Err: err}
	}
	return Answer{Status: response.StatusCode, Header: response.Header, Body: strings.TrimSpace(string(text))}
}

// Field is a text of a JSON answer, "" if it has none.
func (a Answer) Field(name string) string {
	var fields map[string]any
	_ = json.Unmarshal([]byte(a.Body), &fields)
	text, _ := fields[name].(string)
	return text
}
