// Package scenario tests ebpfnet as its users run it: real network namespaces,
// real sockets, and the built plugin binary, called through libcni. Each test
// starts with a fresh node and fails if it leaves anything behind.
//
//	go test ./scenario                    # as root
//	go test -short ./scenario             # small transfers, for slow machines
//	go test ./scenario -long -run 'Flood|ShortConnections|TestPodsShareTheirPorts|TestUpgrade|TestBandwidthChanges'
//	go test ./scenario -fastpath established   # or always, never
//
// On another kernel (see package vm), with the plugin built beforehand:
//
//	CGO_ENABLED=0 go build -o /tmp/scn/ ../cmd/ebpfnet
//	CGO_ENABLED=0 go test -c -o /tmp/scn/scenario.test ./scenario
//	EBPFNET_BIN_DIR=/tmp/scn go run ./vm -kernel 5.10 -timeout 15m -- /tmp/scn/scenario.test -test.v -test.short
//
// It needs the Debian packages that the Makefile lists.
package scenario

import (
	"flag"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var (
	fastPath = flag.String("fastpath", "", "fastPath of all networks that do not set it: established, always or never")
	long     = flag.Bool("long", false, "floods and rates of the size that an attacker needs minutes for")
)

// workload chooses the size of a test: with -short, without, and with -long.
func workload(short, usual, whole int) int {
	switch {
	case testing.Short():
		return short
	case *long:
		return whole
	}
	return usual
}

func TestMain(m *testing.M) { testenv.Main(m) }
