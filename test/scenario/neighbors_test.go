package scenario

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Neighbours: whatever else on the host uses ports, by rules that masquerade and forward. Its ports may be numbers of
// host ports, or in the masquerading range; the datapath must leave both to it.

// neighborPorts are the host ports of the pods in these tests. Half of them belong to each of two pods.
const (
	neighborPort  = 20000
	neighborPorts = 400
)

// mapNeighborPorts maps count host ports from first on to port 80, for TCP and UDP.
func mapNeighborPorts(first uint16, count int) map[string]any {
	var mappings []mapping
	for i := range uint16(count) {
		for _, protocol := range []string{"tcp", "udp"} {
			mappings = append(mappings, mapping{HostPort: first + i, ContainerPort: 80, Protocol: protocol})
		}
	}
	return portMappings(mappings...)
}

// kubeRules are services as kube-proxy makes them, which masquerade every connection.
var kubeRules = []struct {
	name     string
	clients  int // each is open at the same time as the others
	together int // so many ask at once; a server's queue holds 50
	install  func(n *network, t *testing.T, f testenv.Family, pod netip.Addr)
}{
	{"nftables", 200, 50, func(n *network, t *testing.T, f testenv.Family, pod netip.Addr) { n.nftKube(t, f, pod, "") }},
	// One at a time: netfilter drops a packet that opens a connection if two choose one of the few ports at once (insert_failed).
	{"nftables, numbers of host ports", 30, 1, func(n *network, t *testing.T, f testenv.Family, pod netip.Addr) {
		n.nftKube(t, f, pod, fmt.Sprintf("to :%d-%d", neighborPort, neighborPort+neighborPorts-1))
	}},
}

// Ports of the services at the service's address, and of node ports.
const (
	nodePortPod, nodePortOutside = 30080, 30081
)

// Connections to a service get random ports: of the gateway towards pods, of the node towards the outside. The
// backends have host ports.
func TestMasqueradedServices(t *testing.T) {
	for _, rules := range kubeRules {
		t.Run(rules.name, func(t *testing.T) {
			n := newEstablishedNetwork(t)
			n.AddSecondUplink(t)
			a := n.AddPod(t, "a", mapNeighborPorts(neighborPort, neighborPorts/2))
			web := n.AddPod(t, "web", mapNeighborPorts(neighborPort+neighborPorts/2, neighborPorts/2))
			for _, f := range testenv.Families {
				rules.install(n, t, f, f.Pod(web))
			}
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				service := serviceAddrs[f.Name]
				serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
				serve(t, n.SecondOutside, protocol, at(f.SecondOutside, 80))
				for _, tc := range []struct {
					name         string
					from, server *testenv.Namespace
					to           netip.AddrPort
				}{
					{"hairpin", web.Namespace, web.Namespace, at(service, podPort)},
					{"another pod", a.Namespace, web.Namespace, at(service, podPort)},
					{"the node", n.node(), web.Namespace, at(service, podPort)},
					{"node port", n.Outside, web.Namespace, at(f.Node, nodePortPod)},
					{"an outside backend", a.Namespace, n.SecondOutside, at(service, outsidePort)},
					{"node port to an outside backend", n.Outside, n.SecondOutside, at(f.Node, nodePortOutside)},
				} {
					t.Run(tc.name, func(t *testing.T) {
						wantAllReplies(t, rules.clients, rules.together, tc.from, protocol, tc.to, tc.server)
					})
				}
				// Meanwhile host ports work.
				reachUntranslated(t, n.Outside, protocol, at(f.Node, neighborPort+neighborPorts-1), web.Namespace)
			})
		})
	}
}

// wantAllReplies opens connections, and wants a reply on each of them, and more while all are open.
func wantAllReplies(t *testing.T, count, together int, from *testenv.Namespace, protocol string, to netip.AddrPort, server *testenv.Namespace) {
	t.Helper()
	clients := make([]*testenv.Client, count)
	defer func() {
		for _, client := range clients {
			if client != nil {
				client.Close()
			}
		}
	}()
	request := func(ctx context.Context, i int) (err error) {
		isOpening := clients[i] == nil
		if isOpening {
			if clients[i], err = testenv.NewClient(ctx, from, protocol, netip.AddrPort{}, to); err != nil {
				return err
			}
		}
		var reply testenv.Reply
		if isOpening && together > 1 && protocol == "udp" { // netfilter drops it if another one has chosen its port meanwhile
			reply, err = askAgain(ctx, clients[i])
		} else {
			reply, err = clients[i].Ask(ctx, "hello")
		}
		if err == nil && reply.Server != server.Name {
			err = fmt.Errorf("reply from %s, want %s", reply.Server, server.Name)
		}
		return err
	}
	for range 3 {
		for i := 0; i < count; i += together {
			var running sync.WaitGroup
			ctx, failures := testenv.Context(t), make([]error, min(together, count-i))
			for j := range failures {
				running.Go(func() { failures[j] = request(ctx, i+j) })
			}
			running.Wait()
			failures = slices.DeleteFunc(failures, func(err error) bool { return err == nil })
			if len(failures) > 0 {
				t.Fatalf("%s to %s by %s: %d of %d connections failed, one with: %v",
					from.Name, to, protocol, len(failures), min(together, count-i), failures[0])
			}
		}
	}
}

// nftKube adds services and node ports whose backends are the pod and the second host outside. All connections are
// masqueraded, to random ports among those given, or to any.
func (n *network) nftKube(t *testing.T, f testenv.Family, pod netip.Addr, ports string) {
	t.Helper()
	n.nft(t, strings.NewReplacer("IP", map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name],
		"SERVICE", serviceAddrs[f.Name].String(), "POD", at(pod, 80).String(), "OUTSIDE", at(f.SecondOutside, 80).String(),
		"MASQUERADE", "masquerade "+ports+" fully-random",
	).Replace(`table IP kube {
		chain services {
			IP daddr SERVICE tcp dport 80 dnat to POD; IP daddr SERVICE udp dport 80 dnat to POD
			IP daddr SERVICE tcp dport 81 dnat to OUTSIDE; IP daddr SERVICE udp dport 81 dnat to OUTSIDE
			fib daddr type local tcp dport 30080 dnat to POD; fib daddr type local udp dport 30080 dnat to POD
			fib daddr type local tcp dport 30081 dnat to OUTSIDE; fib daddr type local udp dport 30081 dnat to OUTSIDE
		}
		chain pre { type nat hook prerouting priority -100; policy accept; jump services; }
		chain out { type nat hook output priority -100; policy accept; jump services; }
		chain post { type nat hook postrouting priority 100; policy accept;
			ct status dnat meta l4proto tcp MASQUERADE; ct status dnat meta l4proto udp MASQUERADE; }
		chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop; }
	}`))
}
