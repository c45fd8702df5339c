package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/runtimes"
	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// TestProbeEnds has the user end what waits for a node.
func TestProbeEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	hang := make(chan struct{})
	defer close(hang)
	found, err := probe(ctx, []*peer{{}}, func(*peer) []Finding {
		cancel()
		<-hang
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("got %v (%v), want %v", found, err, context.Canceled)
	}
}

// TestPeersOfUnopened tells a datapath that nobody can open from none.
func TestPeersOfUnopened(t *testing.T) {
	for err, want := range map[error]bool{errors.New("damaged"): true, fmt.Errorf("open: %w", loader.ErrNotLoaded): false} {
		if _, got := (&host{errDatapath: err}).peers(); (got != nil) != want {
			t.Errorf("%v: got error %v, want one: %v", err, got, want)
		}
	}
}

// TestAccept has the family's own command.
func TestAccept(t *testing.T) {
	for remote, want := range map[string]string{"192.0.2.2": "iptables -I INPUT ", "2001:db8::2": "ip6tables -I INPUT "} {
		p := &peer{remote: netip.MustParseAddr(remote), port: 4789}
		if got := p.accept("input"); !strings.HasPrefix(got, want) {
			t.Errorf("%s: got %q, want %q", remote, got, want)
		}
	}
}

// TestRenumbered finds an address that is not of the network's ranges, if it has any.
func TestRenumbered(t *testing.T) {
	h := &host{attachments: []*operator.Attachment{{}}}
	h.attachments[0].Network, h.attachments[0].Addresses = "pods", []operator.Address{{Address: netip.MustParseAddr("10.1.0.2")}}
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
