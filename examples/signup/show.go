package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
)

// show is the demonstration, of two visitors and a crowd.
func show(ctx context.Context, out io.Writer, base string, ttl time.Duration) error {
	ann, ben := examplehttp.NewClient(base), examplehttp.NewClient(base)
	ask := func(who string, c *examplehttp.Client, method, path string, body any) (id string) {
		a := c.Do(ctx, method, path, body)
		fmt.Fprintf(out, "%s: %s %s %v\n     %d %s\n", who, method, path, body, a.Status, a.Body)
		return a.Field("id")
	}
	fmt.Fprintln(out, "Ann claims an address, twice: it is the same claim, with the same deadline.")
	first := ask("Ann", ann, "POST", "/claims", map[string]string{"email": "ann@example.com"})
	ask("Ann", ann, "POST", "/claims", map[string]string{"email": "Ann@Example.com"})
	fmt.Fprintln(out, "\nBen cannot have it, nor do anything with Ann's claim.")
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "ANN@example.com"})
	ask("Ben", ben, "DELETE", "/claims/"+first, nil)
	fmt.Fprintln(out, "\nAnn confirms, twice: one user.")
	for range 2 {
		ask("Ann", ann, "POST", "/claims/"+first+"/confirm", map[string]string{"name": "Ann"})
	}
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "ann@example.com"})

	fmt.Fprintln(out, "\nBen claims another one, and cancels: Ann can have it.")
	second := ask("Ben", ben, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	ask("Ben", ben, "DELETE", "/claims/"+second, nil)
	third := ask("Ann", ann, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	fmt.Fprintln(out, "\nAnn goes away. When her time is over Ben can have it, and Ann comes too late.")
	select {
	case <-time.After(ttl):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	ask("Ben", ben, "POST", "/claims", map[string]string{"email": "shop@example.com"})
	ask("Ann", ann, "POST", "/claims/"+third+"/confirm", map[string]string{"name": "Ann's shop"})

	const racers = 20
	fmt.Fprintf(out, "\n%d people want the same address at the same moment.\n", racers)
	counts := map[int]int{}
	for _, status := range exampledb.AtOnce(racers, func(int) int {
		return examplehttp.NewClient(base).Do(ctx, "POST", "/claims", map[string]string{"email": "info@example.com"}).Status
	}) {
		counts[status]++
	}
	fmt.Fprintln(out, "status and how many:", counts)
	return ctx.Err()
}
