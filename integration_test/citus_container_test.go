package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/network"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/pgmetered/metered/internal/pgserver"
)

const citusImage = "citusdata/citus:13.2"

// citusOfContainers starts three containers of the image, which reach each other by names in a network of their own, or skips the test.
func citusOfContainers(t *testing.T) (*pgserver.Citus, error) {
	t.Helper()
	if err := docker(t); err != nil {
		t.Skipf("%s was not tested: there is no Docker (%v). Start it, or set DOCKER_HOST. The other tests named TestCitus ask the same of binaries of this machine.", citusImage, err)
	}
	shared, err := network.New(t.Context())
	testcontainers.CleanupNetwork(t, shared)
	if err != nil {
		return nil, err
	}
	cluster := &pgserver.Citus{}
	for i := range 3 {
		name := fmt.Sprint("node", i)
		c, err := testcontainers.Run(t.Context(), citusImage,
			testcontainers.WithEnv(map[string]string{"POSTGRES_PASSWORD": "metered", "POSTGRES_HOST_AUTH_METHOD": "trust"}), // they have no password of each other
			testcontainers.WithCmd("postgres", "-c", "citus.enable_schema_based_sharding=on", "-c", "wal_level=logical",
				"-c", "max_prepared_transactions=200", "-c", "citus.node_conninfo=sslmode=disable"),
			testcontainers.WithExposedPorts("5432/tcp"),
			network.WithNetwork([]string{name}, shared),
			testcontainers.WithWaitStrategyAndDeadline(2*time.Minute,
				// The image starts a server for its set-up first.
				wait.ForLog("database system is ready to accept connections").WithOccurrence(2), wait.ForListeningPort("5432/tcp")),
		)
		testcontainers.CleanupContainer(t, c)
		if err != nil {
			return nil, err
		}
		address, err := c.PortEndpoint(t.Context(), "5432/tcp", "")
		if err != nil {
			return nil, err
		}
		cluster.At = append(cluster.At, pgserver.CitusNode{
			ConnString: fmt.Sprintf("postgres://postgres:metered@%s/postgres?sslmode=disable", address), Host: name, Port: 5432,
		})
	}
	return cluster, nil
}

// Each public call works through each node of a cluster of containers.
func TestCitus_OnTheImage(t *testing.T) {
	cluster, err := citusOfContainers(t)
	require.NoError(t, err)
	for _, node := range citusNodes {
		t.Run(node, func(t *testing.T) {
			c := onCitus(t, func() (*pgserver.Citus, error) { return cluster, nil }).migrated()
			c.everyCall(node, c.nodes[node], map[string]string{})
		})
	}
}
