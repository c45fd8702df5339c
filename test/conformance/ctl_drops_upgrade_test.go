package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestCtlDropsUpgrade replaces the programs while a reader is attached, by those of another binary and back. Every drop
// of ours and of the stack is printed once, and no program of before stays pinned.
func TestCtlDropsUpgrade(t *testing.T) {
	s := newScript(t)
	h := s.host
	web := s.runtime.AddPod(t, "web", nil)
	h.run(t, "nft add table inet fw")
	h.run(t, "nft add chain inet fw forward { type filter hook forward priority 0 ; }")
	h.run(t, "nft add rule inet fw forward udp dport 9 drop")
	other := loader.Embedded()
	other.Build++

	f := h.follow(t)
	upgrades := []func(){
		func() {},
		func() { testenv.Must(t, h.Node.Upgrade(testenv.Context(t), other)) },
		func() { h.wantCtl(t, 0, []string{"upgrade"}, "replaced revision") },
	}
	for i, upgrade := range upgrades {
		upgrade()
		testenv.Must(t, web.SendFrames(testenv.PodIfName, make([]byte, 60)))
		conn, err := web.Dial(testenv.Context(t), "udp", netip.AddrPortFrom(testenv.OutsideAddr4, 9))
		testenv.Must(t, err)
		defer conn.Close()
		if _, err := conn.Write([]byte("dropped")); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, fmt.Sprintf("the drops after %d upgrades", i), func() error {
			if ours, ofStack := f.countOf("datapath"), f.countOf("stack"); ours != i+1 || ofStack != i+1 {
				return fmt.Errorf("got %d of ours and %d of the stack; %s", ours, ofStack, f.errs.String())
			}
			return nil
		})
	}
	f.stop(t)
	if ours, counted := f.countOf("datapath"), h.dropTotals(t)["mac"]; ours != len(upgrades) || counted != uint64(ours) || len(f.leftOut) > 0 {
		t.Errorf("got %d drops, %d in the counters, and left out %v; want each once", ours, counted, f.leftOut)
	}
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		builds, err := filepath.Glob(filepath.Join(datapath.Dir(), "progs", "*"))
		if len(builds) != 1 || filepath.Base(builds[0]) != loader.BuildID(datapath.Config.Build).String() {
			t.Errorf("got pins %q (%v), want those in use alone", builds, err)
		}
		return nil
	})
}

// withoutMulticast leaves out what the containers' stacks multicast, and the host's does not want.
func withoutMulticast(list []drops.Drop) []drops.Drop {
	return slices.DeleteFunc(list, func(d drops.Drop) bool { return d.Protocol == "icmpv6" })
}

// countOf counts what was reported by the datapath or by the stack.
func (f *followed) countOf(by string) (n int) {
	for _, d := range withoutMulticast(f.list()) {
		if d.By == by {
			n++
		}
	}
	return n
}

// TestCtlDropsUnload ends the reader with a word when nothing is loaded any more, or what was loaded since has another
// reader. Nothing stays pinned.
func TestCtlDropsUnload(t *testing.T) {
	s := newScript(t)
	h := s.host
	for name, after := range map[string]func(){
		"unloaded":     func() {},
		"loaded again": func() { s.runtime.AddPod(t, "other", nil) },
	} {
		t.Run(name, func(t *testing.T) {
			pod := s.runtime.AddPod(t, "before-"+name[:6], nil) // loads
			f := h.follow(t)
			testenv.Must(t, pod.SendFrames(testenv.PodIfName, make([]byte, 60)))
			f.want(t, "before", func(d drops.Drop) bool { return d.Reason == "mac" })
			h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
			if pins, err := os.ReadDir(loader.Root); len(pins) > 0 {
				t.Errorf("got pins %v (%v), want none", pins, err)
			}
			after()
			select {
			case <-f.done:
			case <-testenv.Context(t).Done():
				t.Fatal("it goes on, and prints nothing")
			}
			if code, said := f.cmd.ProcessState.ExitCode(), f.errs.String(); code != 1 || strings.Count(said, "\n") != 1 || !strings.Contains(said, "unloaded") {
				t.Errorf("got exit code %d, %q; want 1, and that it was unloaded", code, said)
			}
		})
	}
}
