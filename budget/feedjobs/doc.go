// Package feedjobs runs consumers of the feed as River jobs: one job for each consumer, however
// many processes there are.
//
//	bill := feedjobs.Consumer{Name: "bill", Do: bill}
//	river.AddWorker(workers, feedjobs.NewWorker(pool, ledger, bill))
//	config.PeriodicJobs = append(config.PeriodicJobs, feedjobs.PeriodicJobs(time.Minute, bill)...)
package feedjobs
