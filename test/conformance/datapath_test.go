package conformance

import (
	"os"
	"runtime"
	"testing"
	"unsafe"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// withDatapath calls use with the node's datapath.
func (h *host) withDatapath(t *testing.T, use func(*loader.Datapath) error) {
	t.Helper()
	testenv.Must(t, h.Node.WithDatapath(use))
}

// TestMaxFlows checks that the first ADD determines the size of the flow maps. Later ADDs with another maxFlows use
// them as they are.
func TestMaxFlows(t *testing.T) {
	h := newLoadingHost(t)
	for _, test := range []struct {
		id       string
		maxFlows any
	}{{"c1", 2048}, {"c2", 4096}, {"c3", absent}} {
		p := h.pod(t, test.id, with(dual("1.1.0"), "maxFlows", test.maxFlows))
		p.add(t)
		wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
		wantSuccess(t, p.try(t, "CHECK"), "")
		h.withDatapath(t, func(datapath *loader.Datapath) error {
			if got := datapath.MaxFlows(); got != 2048 {
				t.Errorf("maximum of flows after the ADD of %s: got %d, want 2048", test.id, got)
			}
			return nil
		})
	}
}

// TestNonMasqueradeCIDRsRemoved checks that non-masquerade CIDRs are removed with the last container that uses them,
// in any network.
func TestNonMasqueradeCIDRsRemoved(t *testing.T) {
	h := newHost(t)
	cidrs := list{"203.0.113.0/24", "198.18.0.0/15", "fd00::/8"}
	conf := with(dual("1.1.0"), "nonMasqueradeCIDRs", cidrs)
	first, second := h.pod(t, "c1", conf), h.pod(t, "c2", conf)
	others := with(with(single("1.1.0"), "name", "others"), "ipam.ranges", list{list{object{"subnet": "10.89.0.0/16"}}})
	other := h.pod(t, "c3", with(others, "nonMasqueradeCIDRs", list{"203.0.113.0/24"}))
	// Its ADD fails after it has written its entries.
	unreachable := with(dual("1.1.0"), "ipam.routes", list{object{"dst": "0.0.0.0/0", "gw": "203.0.113.7"}})
	failing := h.pod(t, "c4", with(unreachable, "nonMasqueradeCIDRs", list{"192.168.0.0/16"}))
	want := func(when string, count int) {
		t.Helper()
		h.withDatapath(t, func(datapath *loader.Datapath) error {
			counts, err := maps.Count(datapath)
			if got := counts["prefixes"]; got != count {
				t.Errorf("CIDRs %s: got %d, want %d", when, got, count)
			}
			return err
		})
	}
	first.add(t)
	want("after the first ADD", 3)
	second.add(t)
	want("after another ADD with the same list", 3)
	other.add(t)
	want("after an ADD with another list", 4)
	if call := failing.try(t, "ADD"); call.Exit == 0 {
		t.Errorf("ADD: got success (%s), want an error", call.Stdout)
	}
	want("after a failed ADD", 4)
	first.del(t)
	want("after the DEL of one of two", 4)
	second.del(t)
	want("after the DEL of both", 1)
	wantSuccess(t, other.try(t, "CHECK"), "")
	other.del(t)
	want("after the last DEL", 0)
}

// TestMemoryOfFlows counts the flows of a large table, of which user space keeps only those that are in use.
func TestMemoryOfFlows(t *testing.T) {
	const flows = 1 << 19
	h := newLoadingHost(t)
	p := h.pod(t, "c1", with(dual("1.1.0"), "maxFlows", flows))
	p.add(t)
	h.withDatapath(t, func(d *loader.Datapath) error {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		_, err := maps.CountFlows(d)
		runtime.ReadMemStats(&after)
		if got, size := after.TotalAlloc-before.TotalAlloc, uint64(flows)*uint64(unsafe.Sizeof(bpf.FlowEntry{})); got > size/4 {
			t.Errorf("memory: got %d bytes, want at most a quarter of the table's %d", got, size)
		} else {
			t.Logf("%d bytes", got)
		}
		return err
	})
	p.del(t)
	testenv.Must(t, os.RemoveAll(loader.Root)) // too large to be kept
}
