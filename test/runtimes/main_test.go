// Package runtimes runs the plugin under real container runtimes, each in a machine of its own.
//
// It is a module of its own, so that the runtimes' dependencies are not the other tests'. One file
// per runtime; `make test-runtimes` installs and builds what they need.
package runtimes

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestMain(m *testing.M) {
	testenv.RunInit(prepareMachine)
	testenv.Main(m)
}

// example returns a configuration that users copy.
func example(t *testing.T, name string) []byte {
	t.Helper()
	return testenv.ReadFile(t, "../../cmd/ebpfnet/"+name)
}
