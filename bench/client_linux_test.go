package main

import (
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgserver"
)

// BenchmarkClient is what a call costs in the program that makes it: allocations, and its
// processor time, in which the server has no part.
//
//	go test -C bench -run none -bench Client -benchtime 5000x [-cpuprofile cpu] [-memprofile mem]
func BenchmarkClient(b *testing.B) {
	server, err := pgserver.Start(b.Context(), pgserver.Options{Log: b.Output()})
	require.NoError(b, err)
	defer server.Stop()
	of := quiet(server.ConnString())
	defer of.close()
	for _, e := range []entry{
		{"by hand", commandCounter}, {"bare", commandBare}, {"command", commandCharge},
		{"counter", chargeCounter}, {"charge", chargeMetered}, {"bound", chargeQuiet},
		{"place and capture", placeAndCapture},
	} {
		b.Run(e.name, func(b *testing.B) {
			cons, drop, err := of.contenders(b.Context(), options{conns: 1}, oneOf(1000), e)
			require.NoError(b, err)
			defer drop()
			for range 200 { // its statements are prepared and planned
				require.NoError(b, cons[0].op(b.Context(), 0))
			}
			runtime.GC()
			b.ReportAllocs()
			before := processorMicros(b)
			for b.Loop() {
				if err := cons[0].op(b.Context(), 0); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((processorMicros(b)-before)/float64(b.N), "client-µs/op")
		})
	}
}

// processorMicros is the processor time that this process has taken.
func processorMicros(b *testing.B) float64 {
	var r syscall.Rusage
	require.NoError(b, syscall.Getrusage(syscall.RUSAGE_SELF, &r))
	return float64(r.Utime.Nano()+r.Stime.Nano()) / 1000
}
