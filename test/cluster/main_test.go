// Package cluster tests the node agent: what it does to the kernel of its host, and agents, an API server and
// traffic together.
//
// It is a module of its own, so that Kubernetes' dependencies are not the other tests'.
package cluster

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
