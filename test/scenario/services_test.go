package scenario

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Services like kube-proxy's: rules of the host translate a virtual address to that of a backend.

var serviceAddrs = map[string]netip.Addr{
	"IPv4": netip.MustParseAddr("172.30.0.1"), "IPv6": netip.MustParseAddr("fd00:30::1"),
}

const (
	podPort     = 80 // of the service with a pod as backend
	outsidePort = 81 // of the service with an outside host as backend
)

func TestServices(t *testing.T) {
	t.Run("established", func(t *testing.T) { servicesWork(t, newEstablishedNetwork(t)) })
	t.Run("auto", func(t *testing.T) { servicesWork(t, newAutoNetwork(t)) })
}

func servicesWork(t *testing.T, n *network) {
	t.Helper()
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	for _, f := range testenv.Families {
		n.nftServices(t, f, f.Pod(web))
	}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		serve(t, n.Outside, protocol, at(f.Outside, 80))
		service := serviceAddrs[f.Name]
		for _, tc := range []struct {
			name         string
			from, server *testenv.Namespace
			port         uint16
			seen         netip.Addr
		}{
			{"another pod", a.Namespace, web.Namespace, podPort, f.Pod(a)},
			{"the same pod", web.Namespace, web.Namespace, podPort, f.Gateway},
			{"an outside backend", a.Namespace, n.Outside, outsidePort, f.Node},
		} {
			t.Run(tc.name, func(t *testing.T) {
				client := connect(t, tc.from, protocol, netip.AddrPort{}, at(service, tc.port))
				defer client.Close()
				for range 20 {
					if seen := ask(t, client, tc.server); seen.Addr() != tc.seen {
						t.Fatalf("server sees %s, want %s", seen, tc.seen)
					}
				}
				// Meanwhile the same client uses the backend's own address.
				if tc.from == tc.server {
					return
				}
				backend := at(f.Pod(web), 80)
				if tc.server == n.Outside {
					backend = at(f.Outside, 80)
				}
				direct := connect(t, tc.from, protocol, netip.AddrPort{}, backend)
				defer direct.Close()
				for range 20 {
					ask(t, direct, tc.server)
					ask(t, client, tc.server)
				}
			})
		}
	})
}

// nftServices adds services with a pod and with an outside host as backends.
func (n *network) nftServices(t *testing.T, f testenv.Family, pod netip.Addr) {
	t.Helper()
	n.service(t, f, pod)
	for _, protocol := range []string{"tcp", "udp"} {
		ip := map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name]
		n.nft(t, fmt.Sprintf("add rule %s kube services %[1]s daddr %s %s dport %d dnat to %s", ip, serviceAddrs[f.Name], protocol, outsidePort, at(f.Outside, 80)))
	}
}

// The node routes between two networks. Its port 8080 is forwarded to a pod.
func TestTransitTraffic(t *testing.T) {
	n := newNetwork(t)
	n.AddSecondUplink(t)
	for _, f := range testenv.Families {
		n.routeBetweenOutsides(t, f)
	}
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		serve(t, n.SecondOutside, protocol, at(f.SecondOutside, 8080))
		serve(t, n.Outside, protocol, at(f.Outside, 8080))

		ping(t, n.Outside, f.SecondOutside)
		reachUntranslated(t, n.Outside, protocol, at(f.SecondOutside, 8080), n.SecondOutside)
		reachUntranslated(t, n.SecondOutside, protocol, at(f.Outside, 8080), n.Outside)
		// The host port works from both networks.
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		reachUntranslated(t, n.SecondOutside, protocol, at(f.SecondNode, 8080), web.Namespace)
	})
}

func (n *network) routeBetweenOutsides(t *testing.T, f testenv.Family) {
	t.Helper()
	testenv.Must(t, n.Outside.AddRoute(netip.PrefixFrom(f.SecondOutside, f.PrefixLen), f.Node))
	testenv.Must(t, n.SecondOutside.AddRoute(netip.PrefixFrom(f.Outside, f.PrefixLen), f.SecondNode))
}
