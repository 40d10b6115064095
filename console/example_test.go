package console_test

import (
	"crypto/subtle"
	"fmt"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
)

// onlyStaff stands for your own authentication. The console has none.
func onlyStaff(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if user != "ops" || subtle.ConstantTimeCompare([]byte(password), []byte("correct horse battery staple")) != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="console"`)
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// The page behind a program's own authentication, below a path of its own.
func Example() {
	pool, done := exampleDatabase()
	defer done()

	page, err := console.New(pool, console.Config{
		Title: "Budgets",
		// Limits come with each call. A program that knows the limits of a scope gives them to the page, for its plots
		// and meters.
		Limits: func(scope string) []budget.Limit {
			return []budget.Limit{budget.PerWindow(1000, time.Hour).Named("hourly")}
		},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux()
	mux.Handle("/ops/budgets/", http.StripPrefix("/ops/budgets", onlyStaff(page)))

	server := httptest.NewUnstartedServer(mux) // in a program: http.Server
	server.Config.RegisterOnShutdown(page.Close)
	server.Start()
	defer server.Close()
	defer page.Close()

	for _, password := range []string{"guess", "correct horse battery staple"} {
		request, _ := http.NewRequest(http.MethodGet, server.URL+"/ops/budgets/", nil)
		request.SetBasicAuth("ops", password)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			fmt.Println(err)
			return
		}
		_ = response.Body.Close()
		fmt.Println(response.Status)
	}
	// Output:
	// 401 Unauthorized
	// 200 OK
}
