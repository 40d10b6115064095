package main

// figures are measured in this order.
var figures = []figure{
	{
		name: "charge_window_1e6_vs_1e2", unit: "times", atMost: 1.15,
		meaning: "a charge with a million entries and 10,000 refunds in its window, against one with a hundred",
		measure: chargeByWindow,
	},
	{
		name: "charge_cold_start", unit: "times", atMost: 1.3,
		meaning: "the last 1,000 of 100,000 charges on a database that was never analysed, against the first 1,000",
		measure: chargeColdStart,
	},
	{
		name: "command_round_trips", unit: "round trips", atMost: 3,
		meaning: "a warm command with token, keyless job and charges, counted on the wire, its function's own statements aside",
		measure: commandRoundTrips,
	},
}
