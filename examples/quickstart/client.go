package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"
)

// file is a file to upload.
type file struct {
	Name    string
	Content []byte
}

// readFiles reads the files named, or some of the repository's own.
func readFiles(paths []string) ([]file, error) {
	if len(paths) == 0 {
		_, here, _, _ := runtime.Caller(0)
		root := filepath.Join(filepath.Dir(here), "..", "..")
		if _, err := os.Stat(filepath.Join(root, "go.mod")); err != nil {
			return nil, fmt.Errorf("the repository that this program was built from is not at %s: name some files to upload", root)
		}
		for _, name := range []string{"LICENSE", "metered.go", "go.sum", "schema.sql"} {
			paths = append(paths, filepath.Join(root, name))
		}
	}
	var files []file
	for _, path := range paths {
		content, err := os.ReadFile(path)
		if err != nil {
			return nil, fmt.Errorf("cannot read a file to upload: %w", err)
		}
		if len(content) > maxContent {
			return nil, fmt.Errorf("%s has %d bytes: this example takes files of up to %d", path, len(content), maxContent)
		}
		files = append(files, file{strings.ToValidUTF8(filepath.Base(path), "_"), content})
	}
	return files, nil
}

// client is the other side of the wire. It knows nothing of the library.
type client struct {
	base string
	http *http.Client
}

func newClient(base string) *client {
	return &client{base, &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: racers}, Timeout: 30 * time.Second}}
}

// sent is one request, which may be sent again.
type sent struct {
	operation, account, token string
	file                      file
}

// answer is the server's answer.
type answer struct {
	status     int
	retryAfter string
	body       string
	problem    problem // if status says so
}

// problem is the body of a refusal, as the client reads it.
type problem struct {
	Code              string `json:"code"`
	Detail            string `json:"detail"`
	RetryAfterSeconds int64  `json:"retry_after_seconds"`
}

func (c *client) upload(ctx context.Context, s sent) (answer, error) {
	target := fmt.Sprintf("%s/accounts/%s/uploads/%s", c.base, url.PathEscape(s.account), url.PathEscape(s.file.Name))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, target, bytes.NewReader(s.file.Content))
	if err != nil {
		return answer{}, err
	}
	req.Header.Set("Authorization", "Bearer "+s.token)
	req.Header.Set("Idempotency-Key", s.operation)
	res, err := c.http.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return answer{}, err
	}
	a := answer{status: res.StatusCode, retryAfter: res.Header.Get("Retry-After"), body: string(body)}
	if a.status >= 400 {
		if err := json.Unmarshal(body, &a.problem); err != nil {
			return answer{}, fmt.Errorf("status %d with the body %.200q", a.status, body)
		}
	}
	return a, nil
}
