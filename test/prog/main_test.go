// Package prog tests each program of the datapath alone, by the kernel's BPF_PROG_TEST_RUN: it
// fills the maps, runs a program on one packet, and checks verdict, packet and maps. Most tests
// are tables of rows, which row_test.go explains.
package prog

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestMain(m *testing.M) { testenv.Main(tests{m}) }

type tests struct{ *testing.M }

// Run also closes the datapath that the tests share.
func (t tests) Run() int {
	code := t.M.Run()
	if datapath != nil {
		datapath.Close()
	}
	return code
}
