package scenario

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const localNodePort = 30081 // its clients are not masqueraded: externalTrafficPolicy: Local

// ipvs sends a service and two node ports on to a pod, as kube-proxy does in IPVS mode: IPVS translates the destination, and tells
// conntrack. The host's rules masquerade the clients of a node port, and a pod that calls itself.
func (n *network) ipvs(t *testing.T, f testenv.Family, pod *testenv.Pod) {
	t.Helper()
	for name, value := range map[string]string{"conntrack": "1", "conn_reuse_mode": "0", "expire_nodest_conn": "1"} {
		testenv.Must(t, n.node().SetSysctl("net/ipv4/vs/"+name, value))
	}
	fill := strings.NewReplacer("IP", map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name], "SERVICE", serviceAddrs[f.Name].String(),
		"NODE", f.Node.String(), "POD", f.Pod(pod).String(), "BACKEND", at(f.Pod(pod), 80).String(),
		"PORTS", fmt.Sprint(at(serviceAddrs[f.Name], 80), " ", at(f.Node, nodePort), " ", at(f.Node, localNodePort)))
	n.sh(t, fill.Replace(`
		ip link show kube-ipvs0 2>/dev/null || ip link add kube-ipvs0 type dummy
		ip addr add SERVICE dev kube-ipvs0
		for port in PORTS; do for protocol in -t -u; do
			ipvsadm -A $protocol $port -s rr
			ipvsadm -a $protocol $port -r BACKEND -m
		done; done`))
	n.nft(t, fill.Replace(`table IP kube {
		chain ports { type nat hook prerouting priority -100; policy accept;
			IP daddr NODE tcp dport 30080 meta mark set 0x4000; IP daddr NODE udp dport 30080 meta mark set 0x4000
		}
		chain masquerades { type nat hook postrouting priority 100; policy accept;
			IP saddr POD IP daddr POD masquerade; meta mark != 0x4000 return; meta mark set 0; masquerade fully-random
		}
	}`))
}

// moveIPVS replaces a backend as kube-proxy does: TCP connections end with their clients, and UDP forgets the old one at once.
func (n *network) moveIPVS(t *testing.T, f testenv.Family, protocol string, virtual netip.AddrPort, from, to *testenv.Pod) {
	t.Helper()
	service := " -" + protocol[:1] + " " + virtual.String() + " -r "
	n.sh(t, "ipvsadm -a"+service+at(f.Pod(to), 80).String()+" -m")
	if protocol == "tcp" {
		n.sh(t, "ipvsadm -e"+service+at(f.Pod(from), 80).String()+" -m -w 0")
		return
	}
	n.sh(t, "ipvsadm -d"+service+at(f.Pod(from), 80).String())
	n.flush(t)
}

// Connections that IPVS balances work as without the fast path. They stay with the stack, also if the host's rules masquerade them:
// IPVS ends connections whose packets it does not see.
func TestIPVS(t *testing.T) {
	testenv.Require(t, testenv.IPVS)
	for _, fastPath := range []string{"never", "established", "auto"} {
		t.Run(fastPath, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "`+fastPath+`"`))
			a, web, other := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil), n.AddPod(t, "other", nil)
			for _, f := range testenv.Families {
				n.ipvs(t, f, web)
			}
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				for _, pod := range []*testenv.Pod{web, other} {
					serve(t, pod.Namespace, protocol, at(f.Pod(pod), 80))
				}
				var clients []*testenv.Client
				service, port := at(serviceAddrs[f.Name], 80), at(f.Node, nodePort)
				for _, tc := range []struct {
					name string
					from *testenv.Namespace
					to   netip.AddrPort
					seen netip.Addr
				}{
					{"a pod", a.Namespace, service, f.Pod(a)},
					{"the same pod", web.Namespace, service, f.Gateway},
					{"a pod at the node port", a.Namespace, port, f.Gateway},
					{"the outside", n.Outside, port, f.Gateway},
					{"the outside, under its address", n.Outside, at(f.Node, localNodePort), f.Outside},
				} {
					client := connect(t, tc.from, protocol, netip.AddrPort{}, tc.to)
					defer client.Close()
					clients = append(clients, client)
					askOften(t, client, web.Namespace)
					if seen := ask(t, client, web.Namespace); seen.Addr() != tc.seen {
						t.Errorf("%s: the server sees %s, want %s", tc.name, seen, tc.seen)
					}
					if n.forwardsOf(t, f, client, web.Namespace) == 0 {
						t.Errorf("%s: bypasses the stack, and IPVS", tc.name)
					}
				}
				t.Run("policies", func(t *testing.T) { n.wantIPVSJudged(t, f, protocol, a, web) })
				for _, virtual := range []netip.AddrPort{service, port} {
					n.moveIPVS(t, f, protocol, virtual, web, other)
				}
				for i, client := range clients {
					want := web
					if protocol == "udp" && i < len(clients)-1 {
						want = other
					}
					askOften(t, client, want.Namespace)
				}
			})
		})
	}
}

// wantIPVSJudged wants rules to judge IPVS's connections by the client and the backend, whatever the host translates.
func (n *network) wantIPVSJudged(t *testing.T, f testenv.Family, protocol string, a, web *testenv.Pod) {
	t.Helper()
	testenv.Require(t, testenv.VisibleHooks)
	cidr := func(peer netip.Addr) string { return fmt.Sprintf(`[{"cidr": "%s/%d"}]`, peer, peer.BitLen()) }
	from := func(peer netip.Addr) string { return `{"ingress": [{"from": ` + cidr(peer) + `}]}` }
	to := func(peer netip.Addr) string { return `{"egress": [{"to": ` + cidr(peer) + `}]}` }
	service := serviceAddrs[f.Name]
	for _, row := range []struct {
		name, policy string
		pod          *testenv.Pod
		client       *testenv.Namespace
		dial         netip.Addr
		port         uint16
		admitted     bool
		reason       maps.Reason
	}{
		{"from the outside", from(f.Outside), web, n.Outside, f.Node, nodePort, true, reasonPolicy},
		{"from the node", from(f.Gateway), web, n.Outside, f.Node, nodePort, false, reasonPolicy},
		{"from the client", from(f.Pod(a)), web, a.Namespace, service, 80, true, reasonPolicy},
		{"from others", from(f.Outside), web, a.Namespace, service, 80, false, reasonPolicy},
		{"to the backend", to(f.Pod(web)), a, a.Namespace, service, 80, true, reasonPolicyEgress},
		{"to the service", to(service), a, a.Namespace, service, 80, false, reasonPolicyEgress},
	} {
		t.Run(row.name, func(t *testing.T) {
			n.setPolicy(t, row.pod, row.policy)
			n.wantProbe(t, fmt.Sprint(protocol, row.port), row.client, web.Namespace, row.dial, row.pod, row.admitted, row.reason)
			n.setPolicy(t, row.pod, `{"ingress": [{}], "egress": [{}]}`)
		})
	}
}
