package pgtest

import "net/http"

// HTTP is a client with connections of its own. Those of http.DefaultClient are broken off whenever
// a test that runs beside closes its httptest.Server.
var HTTP = &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
