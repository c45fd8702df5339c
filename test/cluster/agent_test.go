package cluster

import "testing"

// TestCluster has containers and hosts reach all containers of other nodes.
func TestCluster(t *testing.T) {
	newCluster(t)
}
