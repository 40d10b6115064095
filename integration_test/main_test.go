package integration_test

import (
	"context"
	"fmt"
	"os"
	"testing"
)

func TestMain(m *testing.M) {
	if connString := os.Getenv(gatedEnv); connString != "" {
		if err := workGated(context.Background(), connString); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1) // it works until it is killed
	}
	if connString := os.Getenv(moverEnv); connString != "" {
		fmt.Fprintln(os.Stderr, keepMoving(context.Background(), connString))
		os.Exit(1) // it moves until it is killed
	}
	os.Exit(m.Run())
}
