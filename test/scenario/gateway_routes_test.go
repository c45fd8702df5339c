package scenario

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Routes of a pod with a gateway of their own, and what is behind each gateway.

// gatewayRoute is a route of one family.
type gatewayRoute struct {
	prefix, gateway string
}

// behind is an address in the route's prefix.
func (r gatewayRoute) behind() netip.Addr { return netip.MustParsePrefix(r.prefix).Addr().Next() }

var (
	// byPod has another pod as its gateway: see addGateway.
	byPod = map[string]gatewayRoute{"IPv4": {"203.0.113.0/24", "10.88.0.99"}, "IPv6": {"2001:db8:203::/64", "fd00:88::99"}}
	// byNeighbor has a host outside, on the second uplink. The node itself would use the first one.
	byNeighbor = map[string]gatewayRoute{"IPv4": {"198.18.7.0/24", "198.51.100.2"}, "IPv6": {"2001:db8:207::/64", "2001:db8:2::2"}}
	// byNode has the node, which sends it by its default route.
	byNode = map[string]gatewayRoute{"IPv4": {"198.18.8.0/24", "192.0.2.1"}, "IPv6": {"2001:db8:208::/64", "2001:db8:1::1"}}
)

// withRoutes returns podsConflist with keys instead of ipMasq, and with the routes.
func withRoutes(keys string, routes ...map[string]gatewayRoute) string {
	list := `"routes": [`
	for _, families := range routes {
		for _, route := range families {
			list += fmt.Sprintf(`{"dst": %q, "gw": %q}, `, route.prefix, route.gateway)
		}
	}
	conflist := strings.Replace(withKeys(keys), `"portMappings": true`, `"portMappings": true, "ips": true`, 1)
	return strings.Replace(conflist, `"routes": [`, list, 1)
}

// gatewayPod adds a pod that forwards for others, and answers for what is behind it.
func (n *network) gatewayPod(t *testing.T, id, conflist string) *testenv.Pod {
	t.Helper()
	n.setNetwork(t, withRoutes(`"antiSpoof": false`))
	pod := n.AddPod(t, id, map[string]any{"ips": []string{byPod["IPv4"].gateway, byPod["IPv6"].gateway}})
	n.setNetwork(t, conflist)
	for _, f := range testenv.Families {
		testenv.Must(t, pod.SetSysctl(f.Forwarding, "1"))
		addLoopback(t, pod.Namespace, byPod[f.Name].behind())
	}
	return pod
}

func (n *network) setNetwork(t *testing.T, conflist string) {
	t.Helper()
	testenv.Must(t, n.SetNetwork([]byte(conflist)))
}

func addLoopback(t *testing.T, ns *testenv.Namespace, addr netip.Addr) {
	t.Helper()
	args := []string{"addr", "add", netip.PrefixFrom(addr, addr.BitLen()).String(), "dev", "lo"}
	if addr.Is6() {
		args = append(args, "nodad")
	}
	if _, err := ns.Run(testenv.Context(t), "ip", args...); err != nil {
		t.Fatal(err)
	}
}

// dropsInvalid is what many firewalls do, and what breaks connections of which the stack sees one direction.
const dropsInvalid = `table inet invalid { chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop } }`

func TestRoutesWithGateways(t *testing.T) {
	for _, fastPath := range []string{"never", "established", "always"} {
		t.Run(fastPath, func(t *testing.T) {
			conflist := withRoutes(`"ipMasq": true, "ingressPolicy": "isolated", "fastPath": "`+fastPath+`"`, byPod, byNeighbor, byNode)
			n := newNetworkWith(t, conflist)
			n.nft(t, dropsInvalid)
			n.AddSecondUplink(t)
			pod, gateway := n.AddPod(t, "a", nil), n.gatewayPod(t, "gateway", conflist)
			for _, f := range testenv.Families {
				addLoopback(t, n.SecondOutside, byNeighbor[f.Name].behind())
				addLoopback(t, n.Outside, byNode[f.Name].behind())
			}
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				for _, tc := range []struct {
					route  gatewayRoute
					server *testenv.Namespace
					seen   netip.Addr
				}{
					{byPod[f.Name], gateway.Namespace, f.Pod(pod)},
					{byNeighbor[f.Name], n.SecondOutside, f.SecondNode},
					{byNode[f.Name], n.Outside, f.Node},
				} {
					ping(t, pod.Namespace, tc.route.behind())
					server := serve(t, tc.server, protocol, at(tc.route.behind(), 0))
					client := connect(t, pod.Namespace, protocol, netip.AddrPort{}, server)
					defer client.Close()
					for range testenv.OffloadRequests {
						if seen := ask(t, client, tc.server); seen.Addr() != tc.seen {
							t.Fatalf("%s sees %s, want %s", tc.server.Name, seen, tc.seen)
						}
					}
				}
			})
			forEachFamily(t, func(t *testing.T, f testenv.Family) { // the node is no hop on the way
				for _, addr := range []netip.Addr{byPod[f.Name].behind(), byNeighbor[f.Name].behind()} {
					testenv.NoError(t, testenv.Ping(testenv.Context(t), pod.Namespace, addr, "-t", "1"))
				}
			})
			wantCheck(t, pod)
		})
	}
}

// The gateway's pod may come after the pod that uses it, go, and come back. Until then, packets are dropped and
// counted. What is behind a gateway opens connections as well.
func TestGatewayPodComesAndGoes(t *testing.T) {
	conflist := withRoutes(`"ipMasq": false`, byPod, byNeighbor)
	n := newNetworkWith(t, conflist)
	n.nft(t, dropsInvalid)
	n.AddSecondUplink(t)
	n.routeToPods(t)
	pod := n.AddPod(t, "a", nil)
	for _, f := range testenv.Families {
		addLoopback(t, n.SecondOutside, byNeighbor[f.Name].behind())
	}
	for _, id := range []string{"first", "second"} {
		for _, f := range testenv.Families {
			n.wantNoGateway(t, pod, byPod[f.Name].behind())
		}
		gateway := n.gatewayPod(t, id, conflist)
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			podServer := serve(t, pod.Namespace, protocol, at(f.Pod(pod), 0))
			for remote, addr := range map[*testenv.Namespace]netip.Addr{
				gateway.Namespace: byPod[f.Name].behind(), n.SecondOutside: byNeighbor[f.Name].behind(),
			} {
				server := serve(t, remote, protocol, at(addr, 0))
				reachUntranslated(t, pod.Namespace, protocol, server, remote)
				client := connect(t, remote, protocol, at(addr, 0), podServer)
				defer client.Close()
				for range testenv.OffloadRequests {
					if seen := ask(t, client, pod.Namespace); seen.Addr() != addr {
						t.Fatalf("pod sees %s, want %s", seen, addr)
					}
				}
			}
		})
		del(t, gateway)
	}
}

// wantNoGateway sends a packet to an address behind a gateway that does not exist.
func (n *network) wantNoGateway(t *testing.T, from *testenv.Pod, to netip.Addr) {
	t.Helper()
	before := n.dropsFor(t, bpf.ReasonNextHop)
	if _, err := from.Run(testenv.Context(t), "bash", "-c", "echo >/dev/udp/"+to.String()+"/9"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "the drop of a packet without a gateway", func() error {
		if dropped := n.dropsFor(t, bpf.ReasonNextHop); dropped != before+1 {
			return fmt.Errorf("dropped %d, want %d", dropped, before+1)
		}
		return nil
	})
}
