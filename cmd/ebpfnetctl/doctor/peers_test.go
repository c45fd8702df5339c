package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// TestProbeEnds wants no further probes after the end of the time.
func TestProbeEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	found := (&peer{}).look(ctx)
	if len(found) != 1 || found[0].State != Unknown {
		t.Errorf("got %+v, want that the node was not probed", found)
	}
}

// TestPeersOfUnopened wants an error for a datapath that cannot be opened, and none where nothing is loaded.
func TestPeersOfUnopened(t *testing.T) {
	for err, want := range map[error]bool{errors.New("damaged"): true, fmt.Errorf("open: %w", loader.ErrNotLoaded): false} {
		if _, got := (&host{errDatapath: err}).peers(); (got != nil) != want {
			t.Errorf("%v: got error %v, want one: %v", err, got, want)
		}
	}
}

// TestPing wants an answer from this host to short and long packets, and none to one that its link does not carry.
func TestPing(t *testing.T) {
	for _, addr := range []string{"127.0.0.1", "::1"} {
		for size, want := range map[int]error{shortPing: nil, 1500: nil, 65537: unix.EMSGSIZE} {
			if trip, err := ping(netip.MustParseAddr(addr), size); !errors.Is(err, want) || (err == nil) != (trip > 0) {
				t.Errorf("%s, %d bytes: got %v (%v), want %v", addr, size, trip, err, want)
			}
		}
	}
}

// TestRenumbered finds an address that is not of the network's ranges, if it has any.
func TestRenumbered(t *testing.T) {
	h := &host{attachments: []*admin.Attachment{{}}}
	h.attachments[0].Network, h.attachments[0].Addresses = "pods", []admin.Address{{Address: netip.MustParseAddr("10.1.0.2")}}
	for subnet, want := range map[string]int{"": 0, "10.1.0.0/24": 0, "10.2.0.0/24": 1} {
		n := &network{file: runtimes.File{List: &libcni.NetworkConfigList{Name: "pods"}}, config: &config.Config{IPAM: &ipam.Config{}}}
		if subnet != "" {
			n.config.IPAM.Ranges = []ipam.RangeSet{{{Subnet: netip.MustParsePrefix(subnet)}}}
		}
		if got := h.lookRenumbered(n); len(got) != want {
			t.Errorf("subnet %q: got %+v, want %d findings", subnet, got, want)
		}
	}
}
