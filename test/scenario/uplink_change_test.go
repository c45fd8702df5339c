package scenario

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Offloaded connections continue when the host's routes, and then the remote's, lead to another uplink. conntrack has not seen
// their data, so they cannot return to the stack. Masqueraded ones end, as with netfilter: the other uplink has another address.
func TestOffloadedConnectionsChangeUplink(t *testing.T) {
	n := newRoutedNetwork(t, withKeys(`"fastPath": "established"`))
	n.nft(t, `table inet filter { chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop } }`)
	n.AddSecondLink(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	var ends [][2]net.Conn
	for _, f := range testenv.Families {
		for _, p := range n.forwardedPaths(f, a, web)[1:] {
			client, server := n.offloadUnseen(t, p.path)
			ends = append(ends, [2]net.Conn{client, server}, [2]net.Conn{server, client})
		}
	}
	continues := func() {
		for _, e := range ends {
			send(t, e[0], e[1], strings.Repeat("x", mebibyte))
		}
	}
	route := func(ns *testenv.Namespace, to, gateway netip.Addr) {
		testenv.Must(t, ns.AddRoute(netip.PrefixFrom(to, to.BitLen()), gateway))
	}
	for _, f := range testenv.Families {
		route(n.node(), f.Outside, f.SecondOutside)
	}
	continues()
	for _, f := range testenv.Families {
		for _, to := range []netip.Addr{f.Node, f.Pod(a), f.Pod(web)} {
			route(n.Outside, to, f.SecondNode)
		}
	}
	continues()
}
