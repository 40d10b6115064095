//go:build !linux

package main

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// disk is a small file system, which this system has not.
type disk string

func newDisk(*testing.T) disk { return "" }

func (disk) use(context.Context, *pgxpool.Pool, string) error { return nil }

func (disk) fill(time.Duration) error { return nil }
