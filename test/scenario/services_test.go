package scenario

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Services as kube-proxy makes them: an address that nobody has, which rules of the host
// translate to that of a backend. The stack has to see every packet of such a connection.

var serviceAddrs = map[string]netip.Addr{
	"IPv4": netip.MustParseAddr("172.30.0.1"), "IPv6": netip.MustParseAddr("fd00:30::1"),
}

const (
	toPodPort     = 80 // of the service whose backend is a pod
	toOutsidePort = 81
)

func TestServices(t *testing.T) {
	for name, install := range map[string]func(*network, *testing.T, family, netip.Addr){
		"nftables": (*network).nftServices, "iptables": (*network).iptablesServices,
	} {
		t.Run(name, func(t *testing.T) {
			n := newEstablishedNetwork(t)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
			for _, f := range families {
				install(n, t, f, f.pod(web))
			}
			byEachProtocol(t, func(t *testing.T, f family, protocol string) {
				serve(t, web.Namespace, protocol, at(f.pod(web), 80))
				serve(t, n.Outside, protocol, at(f.outside, 80))
				service := serviceAddrs[f.name]
				for _, tc := range []struct {
					name         string
					from, server *testenv.Namespace
					port         uint16
					seen         netip.Addr
				}{
					{"another pod", a.Namespace, web.Namespace, toPodPort, f.pod(a)},
					{"the same pod", web.Namespace, web.Namespace, toPodPort, f.gateway},
					{"an outside backend", a.Namespace, n.Outside, toOutsidePort, f.node},
				} {
					t.Run(tc.name, func(t *testing.T) {
						client := connect(t, tc.from, protocol, netip.AddrPort{}, at(service, tc.port))
						defer client.Close()
						for range 20 {
							if seen := ask(t, client, tc.server); seen.Addr() != tc.seen {
								t.Fatalf("the server sees %s, want %s", seen, tc.seen)
							}
						}
						// The backend itself is asked meanwhile, from the same port where that is free.
						if tc.from == tc.server {
							return
						}
						backend := at(f.pod(web), 80)
						if tc.server == n.Outside {
							backend = at(f.outside, 80)
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
		})
	}
}

// nftServices has services with a pod and with a host outside as their backends. What comes
// back to who has sent it gets another source, since it would not answer itself.
func (n *network) nftServices(t *testing.T, f family, pod netip.Addr) {
	t.Helper()
	n.nft(t, strings.NewReplacer("IP", map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.name],
		"SERVICE", serviceAddrs[f.name].String(), "POD", pod.String(), "BACKEND1", at(pod, 80).String(), "BACKEND2", at(f.outside, 80).String(),
	).Replace(`table IP kube {
		chain services { type nat hook prerouting priority -100; policy accept;
			IP daddr SERVICE tcp dport 80 dnat to BACKEND1; IP daddr SERVICE udp dport 80 dnat to BACKEND1
			IP daddr SERVICE tcp dport 81 dnat to BACKEND2; IP daddr SERVICE udp dport 81 dnat to BACKEND2
		}
		chain hairpins { type nat hook postrouting priority 100; policy accept; IP saddr POD IP daddr POD masquerade; }
		chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop; }
	}`))
}

func (n *network) iptablesServices(t *testing.T, f family, pod netip.Addr) {
	t.Helper()
	command := map[string]string{"IPv4": "iptables", "IPv6": "ip6tables"}[f.name]
	requireTool(t, command, "iptables")
	service := serviceAddrs[f.name].String()
	rules := []string{
		"-t nat -A POSTROUTING -s " + pod.String() + " -d " + pod.String() + " -j MASQUERADE",
		"-A FORWARD -m conntrack --ctstate INVALID -j DROP",
	}
	for _, protocol := range []string{"tcp", "udp"} {
		match := "-t nat -A PREROUTING -d " + service + " -p " + protocol
		rules = append(rules,
			match+" --dport 80 -j DNAT --to-destination "+at(pod, 80).String(),
			match+" --dport 81 -j DNAT --to-destination "+at(f.outside, 80).String(),
		)
	}
	for _, rule := range rules {
		if _, err := n.node().Run(testenv.Context(t), command, strings.Fields(rule)...); err != nil {
			t.Fatal(err)
		}
	}
}
