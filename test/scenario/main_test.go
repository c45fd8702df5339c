// Package scenario tests ebpfnet as its users meet it: real network namespaces,
// real sockets, the built plugin binary, and libcni to run it. Each test is a
// story that begins on a fresh node and leaves nothing behind, which the end of
// each one checks.
//
//	go test ./scenario                    # as root
//	go test -short ./scenario             # small transfers, for slow machines
//	go test ./scenario -fastpath always   # or never
//
// On another kernel (see package vm), with the plugin built beforehand:
//
//	CGO_ENABLED=0 go build -o /tmp/scn/ ../cmd/ebpfnet
//	CGO_ENABLED=0 go test -c -o /tmp/scn/scenario.test ./scenario
//	EBPFNET_BIN_DIR=/tmp/scn go run ./vm -kernel 5.10 -timeout 15m -- /tmp/scn/scenario.test -test.v -test.short
//
// It needs the Debian packages nftables, iptables and bpftool.
package scenario

import (
	"flag"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var fastPath = flag.String("fastpath", "", "of all networks that do not say it themselves: always or never, not the default")

// needsStack is for stories in which the host's stack, or a program after ours, sees packets that
// it would not see with fastPath always.
func needsStack(t *testing.T) {
	t.Helper()
	if *fastPath == "always" {
		t.Skip("fastPath always keeps packets from what this is about")
	}
}

func TestMain(m *testing.M) { testenv.Main(m) }
