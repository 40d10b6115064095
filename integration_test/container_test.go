package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/pgmetered/metered/internal/pgserver"
)

// The oldest and the newest version that are supported.
func TestSystem_OnPostgresOfAContainer(t *testing.T) {
	for _, image := range []string{"postgres:14-alpine", "postgres:18-alpine"} {
		t.Run(image, func(t *testing.T) {
			t.Parallel()
			exercise(t, container(t, image))
		})
	}
}

// container starts an image by testcontainers, or skips the test.
func container(t *testing.T, image string) (connString string) {
	t.Helper()
	if err := docker(t); err != nil {
		t.Skipf("%s was not tested: there is no Docker (%v). Start it, or set DOCKER_HOST. TestSystem_OnThisMachine asks the same of the server of this machine.", image, err)
	}
	c, err := testcontainers.Run(t.Context(), image,
		testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": "metered"}),
		testcontainers.WithExposedPorts("5432/tcp"),
		testcontainers.WithWaitStrategyAndDeadline(2*time.Minute,
			// The image starts a server for its set-up first.
			wait.ForLog("database system is ready to accept connections").WithOccurrence(2), wait.ForListeningPort("5432/tcp")),
	)
	testcontainers.CleanupContainer(t, c)
	require.NoError(t, err)
	address, err := c.PortEndpoint(t.Context(), "5432/tcp", "")
	require.NoError(t, err)
	return fmt.Sprintf("postgres://postgres:metered@%s/postgres?sslmode=disable", address)
}

// docker asks the daemon how it is.
func docker(t *testing.T) (err error) {
	defer func() {
		if r := recover(); r != nil { // testcontainers panics without one
			err = fmt.Errorf("%v", r)
		}
	}()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return err
	}
	defer provider.Close()
	return provider.Health(t.Context())
}

// The server of DATABASE_URL, or of this machine, or a downloaded one.
func TestSystem_OnThisMachine(t *testing.T) {
	t.Parallel()
	server, err := pgserver.Start(t.Context(), pgserver.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	exercise(t, server.ConnString())
}
