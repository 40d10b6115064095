package main

import (
	"context"
	"io"
	"time"
)

func (b *bench) soak(ctx context.Context, length time.Duration, w io.Writer) error { return nil }
