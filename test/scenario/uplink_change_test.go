package scenario

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Offloaded connections follow the host's routes to another uplink, if rules let them. conntrack has not seen their data, so they
// cannot return to the stack. Masqueraded ones end, as with netfilter: the other uplink has another address.
func TestOffloadedConnectionsChangeUplink(t *testing.T) {
	n := newRoutedNetwork(t, withKeys(`"fastPath": "established"`))
	n.nft(t, dropInvalid)
	n.AddSecondLink(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	var ends [][2]net.Conn
	for _, f := range testenv.Families {
		for _, p := range n.forwardedPaths(f, a, web)[1:] {
			client, server := n.offloadUnseen(t, p.path)
			ends = append(ends, [2]net.Conn{client, server}, [2]net.Conn{server, client})
		}
	}
	n.nft(t, `table inet kill { counter killed { }
		chain forward { type filter hook forward priority 0; policy accept;
			oifname eth1 counter name killed drop; iifname eth1 counter name killed drop } }`)
	nft(t, n.Outside, `table inet seen { counter arrived { }
		chain input { type filter hook input priority 0; policy accept; iifname eth1 meta l4proto tcp counter name arrived } }`)
	for _, f := range testenv.Families {
		testenv.Must(t, n.node().AddRoute(netip.PrefixFrom(f.Outside, f.Outside.BitLen()), f.SecondOutside))
		for _, to := range []netip.Addr{f.Node, f.Pod(a), f.Pod(web)} {
			testenv.Must(t, n.Outside.AddRoute(netip.PrefixFrom(to, to.BitLen()), f.SecondNode))
		}
	}
	for _, e := range ends {
		_, err := io.WriteString(e[0], "killed")
		testenv.Must(t, err)
	}
	testenv.Eventually(t, "the rules to drop updates", func() error {
		if out := nft(t, n.node(), "list counter inet kill killed"); strings.Contains(out, "packets 0 ") {
			return errors.New(out)
		}
		return nil
	})
	if out := nft(t, n.Outside, "list counter inet seen arrived"); !strings.Contains(out, "packets 0 ") {
		t.Errorf("packets passed the rules against the other uplink: %s", out)
	}
	n.nft(t, "delete table inet kill")
	for _, e := range ends {
		send(t, e[0], e[1], strings.Repeat("x", mebibyte))
	}
}
