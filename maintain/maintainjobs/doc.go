// Package maintainjobs runs package maintain as periodic River jobs.
//
//	river.AddWorker(workers, maintainjobs.NewWorker(pool, parts, policy))
//	config.PeriodicJobs = append(config.PeriodicJobs, maintainjobs.PeriodicJobs(time.Minute, 24*time.Hour)...)
package maintainjobs
