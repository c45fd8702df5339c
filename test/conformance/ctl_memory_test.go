package conformance

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// mustCtl runs ebpfnetctl on the node, wants it to succeed, and returns its output.
func mustCtl(t *testing.T, h *host, args ...string) string {
	t.Helper()
	stdout, err := h.Node.Run(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), args...)
	testenv.Must(t, err)
	return stdout
}

// TestCtlCost compares the maps in the status with the pinned ones: it lists the memory of each, and their sum.
// An empty trie uses none: the container here has those of all, and the node no cluster.
func TestCtlCost(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.1.0"), "nonMasqueradeCIDRs", list{"203.0.113.0/24"}))
	p.conf = with(p.conf, "ipam.routes", list{object{"dst": "203.0.113.0/24", "gw": "10.88.0.99"}})
	p.conf = with(withPort(p.conf, 8080), "args", object{"cni": object{"portSources": list{object{"hostPort": 8080, "sources": list{"203.0.113.0/24"}}}}})
	p.conf = with(p.conf, "policy", object{"egress": list{object{"to": list{object{"cidr": "203.0.113.0/24"}}}}})
	p.add(t)
	var status struct {
		Maps []struct {
			Name  string
			Bytes uint64
		}
		Bytes uint64
	}
	testenv.Must(t, json.Unmarshal([]byte(mustCtl(t, h, "status", "-o", "json")), &status))
	pins, err := filepath.Glob(filepath.Join(loader.Root, "netns-*", "maps", "*"))
	testenv.Must(t, err)
	text := strings.Fields(mustCtl(t, h, "status", "-o", "wide"))
	var sum uint64
	for _, m := range status.Maps {
		sum += m.Bytes
		isPin := func(pin string) bool { return filepath.Base(pin) == m.Name }
		if (m.Bytes == 0) != (m.Name == bpf.MapNodes) || !slices.ContainsFunc(pins, isPin) || !slices.Contains(text, m.Name) {
			t.Errorf("map %+v: want its bytes, a pin among %v, and a line in %v", m, pins, text)
		}
	}
	if sum != status.Bytes || len(status.Maps) != len(pins) || !slices.Contains(text, fmt.Sprint(sum)) {
		t.Errorf("got %d maps of %d bytes, total %d; want the maps of %v, and their sum in %v", len(status.Maps), sum, status.Bytes, pins, text)
	}
}
