package scenario

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// service translates a service's address to a backend's, as kube-proxy's rules do, and drops what conntrack finds invalid.
func (n *network) service(t *testing.T, f testenv.Family, backend netip.Addr) {
	t.Helper()
	n.nft(t, strings.NewReplacer("IP", map[string]string{"IPv4": "ip", "IPv6": "ip6"}[f.Name],
		"SERVICE", serviceAddrs[f.Name].String(), "BACKEND", at(backend, 80).String(), "POD", backend.String(),
	).Replace(`table IP kube {}
		delete table IP kube
		table IP kube {
			chain services { type nat hook prerouting priority -100; policy accept;
				IP daddr SERVICE tcp dport 80 dnat to BACKEND; IP daddr SERVICE udp dport 80 dnat to BACKEND
			}
			chain hairpins { type nat hook postrouting priority 100; policy accept; IP saddr POD IP daddr POD masquerade; }
			chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop; }
		}`))
}

// forget removes conntrack's entry for the connection that a client has opened.
func (n *network) forget(t *testing.T, client netip.AddrPort) {
	t.Helper()
	testenv.Require(t, testenv.Conntrack)
	filter := &netlink.ConntrackFilter{}
	testenv.Must(t, filter.AddIP(netlink.ConntrackOrigSrcIP, client.Addr().AsSlice()))
	var count uint
	testenv.Must(t, n.node().Do(func() (err error) {
		count, err = netlink.ConntrackDeleteFilters(netlink.ConntrackTable, netlink.InetFamily(nl.GetIPFamily(client.Addr().AsSlice())), filter)
		return err
	}))
	if count == 0 {
		t.Fatalf("conntrack has no entry of %s", client)
	}
}

// flush removes all of conntrack's entries.
func (n *network) flush(t *testing.T) {
	t.Helper()
	testenv.Require(t, testenv.Conntrack)
	testenv.Must(t, n.node().Do(func() error { return netlink.ConntrackTableFlush(netlink.ConntrackTable) }))
}

// eventuallyOffloads waits until the stack forwards no packets of the connection.
func (n *network) eventuallyOffloads(t *testing.T, f testenv.Family, client *testenv.Client, server *testenv.Namespace) {
	t.Helper()
	n.eventuallyForwards(t, f, client, server, false)
}

// Connections to a service bypass the stack in both directions, as long as conntrack has them. Those of a pod to itself
// are masqueraded, too.
func TestServicesAreOffloaded(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	for _, fastPath := range []string{"established", "auto"} {
		t.Run(fastPath, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "`+fastPath+`"`))
			a, web, other := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil), n.AddPod(t, "other", nil)
			forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
				n.service(t, f, f.Pod(web))
				for _, server := range []*testenv.Pod{web, other} {
					serve(t, server.Namespace, protocol, at(f.Pod(server), 80))
				}
				service := at(serviceAddrs[f.Name], 80)
				client := connect(t, a.Namespace, protocol, netip.AddrPort{}, service)
				n.eventuallyOffloads(t, f, client, web.Namespace)
				if seen := ask(t, client, web.Namespace); seen != client.Local() {
					t.Errorf("server sees %s, want %s", seen, client.Local())
				}
				// The port's next connection begins in the stack; the one of UDP is the same one.
				testenv.Must(t, client.Reset())
				client = connect(t, a.Namespace, protocol, client.Local(), service)
				defer client.Close()
				if protocol == "tcp" && n.forwardsOf(t, f, client, web.Namespace) == 0 {
					t.Error("the port's next connection bypasses the stack from its beginning")
				}
				n.eventuallyOffloads(t, f, client, web.Namespace)
				n.wantCloseSeen(t, a.Namespace, protocol, service)
				itself := connect(t, web.Namespace, protocol, netip.AddrPort{}, service)
				defer itself.Close()
				n.eventuallyOffloads(t, f, itself, web.Namespace)

				n.service(t, f, f.Pod(other))
				n.wantStillOffloaded(t, f, client, web.Namespace)
				n.forget(t, client.Local())
				n.wantRetargeted(t, protocol, client, other)
			})
			n.wantTransfers(t, a, web)
		})
	}
}

// wantStillOffloaded wants new rules to leave a connection past the stack, but for a conntrack update of each side. The last
// packets of other connections may be late, so it asks again, but not so often that the connection could return past the stack.
func (n *network) wantStillOffloaded(t *testing.T, f testenv.Family, client *testenv.Client, server *testenv.Namespace) {
	t.Helper()
	first := n.forwardsOf(t, f, client, server)
	if first <= 2 {
		return
	}
	if second := n.forwardsOf(t, f, client, server); second > 2 {
		t.Errorf("a connection does not survive new rules: the stack has forwarded %d packets, then %d", first, second)
	}
}

// wantRetargeted wants the requests of a connection that conntrack has forgotten to reach another server. It does not know the
// connection of TCP, and resets it.
func (n *network) wantRetargeted(t *testing.T, protocol string, client *testenv.Client, server *testenv.Pod) {
	t.Helper()
	ask := func() (testenv.Reply, error) {
		ctx, cancel := context.WithTimeout(testenv.Context(t), time.Second) // a reply that is on its way is lost
		defer cancel()
		return client.Ask(ctx, "hello")
	}
	testenv.Eventually(t, "requests to reach the service's new backend", func() error {
		reply, err := ask()
		switch {
		case protocol == "tcp" && !errors.Is(err, syscall.ECONNRESET):
			return fmt.Errorf("reply from %q (%v), want a RST", reply.Server, err)
		case protocol == "tcp":
			return nil
		case err == nil && reply.Server != server.Namespace.Name:
			return fmt.Errorf("reply from %s", reply.Server)
		}
		return err
	})
	if protocol == "udp" {
		testenv.Eventually(t, "the cached decisions of all CPUs to end", func() error {
			for range testenv.OffloadRequests {
				if reply, err := ask(); err != nil || reply.Server != server.Namespace.Name {
					return fmt.Errorf("reply from %s (%v)", reply.Server, err)
				}
			}
			return nil
		})
	}
}

// wantCloseSeen wants conntrack to see the end of a connection that bypasses the stack.
func (n *network) wantCloseSeen(t *testing.T, from *testenv.Namespace, protocol string, service netip.AddrPort) {
	t.Helper()
	client := connect(t, from, protocol, netip.AddrPort{}, service)
	for range testenv.OffloadRequests {
		testenv.Must(t, askOnce(t, client))
	}
	testenv.Must(t, client.Close())
	testenv.Eventually(t, "conntrack to see the end", func() error {
		if known := n.tracked(t, client.Local()); protocol == "tcp" && known != nil && stateOf(known) < tcpLastACK {
			return fmt.Errorf("state: got %d, want at least %d", stateOf(known), tcpLastACK)
		}
		return nil
	})
}

// wantTransfers moves data through the service in both directions.
func (n *network) wantTransfers(t *testing.T, a, web *testenv.Pod) {
	t.Helper()
	for _, f := range testenv.Families {
		n.service(t, f, f.Pod(web))
		server, service, large := at(f.Pod(web), 80), at(serviceAddrs[f.Name], 80), sizeOf(8*mebibyte)
		upload(large)(t, a.Namespace, web.Namespace, server, service)
		download(large)(t, a.Namespace, web.Namespace, server, service)
	}
}

// A service's backend on another node is reached past both stacks, by either kind of route.
func TestServicesBetweenNodes(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	for _, path := range []string{"never", "established"} {
		t.Run(path, func(t *testing.T) {
			a, b := newNodes(t, `"ipMasq": true, "mtu": 1430, "fastPath": "`+path+`"`)
			a.nft(t, forwarded)
			b.nft(t, forwarded)
			// Its flow of the rules is the service's, and what arrives has the backend's address.
			a.setPolicy(t, a.pod, `{"ingress": [], "egress": [{"to": [{"cidr": "10.88.0.0/16"}, {"cidr": "fd00:88::/32"}]}]}`)
			test := func(t *testing.T) {
				forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
					a.service(t, f, f.Pod(b.pod))
					serve(t, b.pod.Namespace, protocol, at(f.Pod(b.pod), 80))
					wantOffloaded(t, path, protocol, a, b, at(serviceAddrs[f.Name], 80))
				})
				a.wantTransfers(t, a.pod, b.pod)
			}
			forEachUnderlay(t, a, b, func(t *testing.T, _ testenv.Family) { test(t) })
			t.Run("direct", func(t *testing.T) {
				a.reachDirectly(t, b, [2]netip.Addr{testenv.IPv4.Outside, testenv.IPv6.Outside})
				b.reachDirectly(t, a, [2]netip.Addr{testenv.IPv4.Node, testenv.IPv6.Node})
				test(t)
			})
		})
	}
}

// countingServer is a UDP server that counts what it gets, and answers the first packets only.
type countingServer struct {
	received, last atomic.Int64 // packets, and when the last one came
}

func (s *countingServer) run(socket *net.UDPConn) {
	buffer := make([]byte, numberedLen)
	for {
		length, from, err := socket.ReadFromUDPAddrPort(buffer)
		if err != nil {
			return // the end of the test
		}
		s.last.Store(time.Now().UnixNano())
		if s.received.Add(1) > 3 {
			continue
		}
		if _, err := socket.WriteToUDPAddrPort(buffer[:length], from); err != nil {
			return
		}
	}
}

// await waits for more packets.
func (s *countingServer) await(t *testing.T, packets int64) {
	t.Helper()
	before := s.received.Load()
	testenv.Eventually(t, "packets", func() error {
		if got := s.received.Load() - before; got < packets {
			return fmt.Errorf("a backend has got %d", got)
		}
		return nil
	})
}

// A service's backend is replaced while a pod sends to it, and gets few answers. Soon all packets reach the new one.
func TestServiceRetargetedUnderLoad(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	a, web, other := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil), n.AddPod(t, "other", nil)
	for name, forget := range map[string]func(*testing.T, netip.AddrPort){
		"deletion": n.forget, "flush": func(t *testing.T, _ netip.AddrPort) { n.flush(t) },
	} {
		t.Run(name, func(t *testing.T) {
			forEachFamily(t, func(t *testing.T, f testenv.Family) { n.retargetUnderLoad(t, f, a, web, other, forget) })
		})
	}
}

func (n *network) retargetUnderLoad(t *testing.T, f testenv.Family, a, web, other *testenv.Pod, forget func(*testing.T, netip.AddrPort)) {
	t.Helper()
	n.service(t, f, f.Pod(web))
	var before, after countingServer
	go before.run(listenPacket(t, web.Namespace, at(f.Pod(web), 80)))
	go after.run(listenPacket(t, other.Namespace, at(f.Pod(other), 80)))
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	client, err := a.Namespace.Dial(ctx, "udp", at(serviceAddrs[f.Name], 80))
	testenv.Must(t, err)
	defer client.Close()
	go (&numbered{}).send(ctx, client)
	before.await(t, 20_000)
	forwards := n.stackForwards(t, f)
	before.await(t, 20_000)
	if count := n.stackForwards(t, f) - forwards; count > 1000 {
		t.Errorf("the stack has forwarded %d of 20,000 packets and their replies, want at most 1,000", count)
	}

	start := time.Now()
	n.service(t, f, f.Pod(other))
	ruled := time.Now()
	forget(t, client.LocalAddr().(*net.UDPAddr).AddrPort())
	forgotten := time.Now()
	testenv.Eventually(t, "the cached decisions of all CPUs to end", func() error {
		count := before.received.Load()
		after.await(t, 20_000)
		if late := before.received.Load() - count; late > 0 {
			return fmt.Errorf("the old backend has got %d packets more", late)
		}
		return nil
	})
	last := time.Unix(0, before.last.Load())
	t.Logf("the old backend's last packet came %s after conntrack had no entry, %s after the new rules, which took %s", last.Sub(forgotten), last.Sub(ruled), ruled.Sub(start))
}

// The rules of both pods judge a service's connection by its backend, also when they change while it bypasses the stack.
func TestPolicyOfOffloadedServices(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	n := newEstablishedNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		n.service(t, f, f.Pod(web))
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		ports := `"ports": [{"port": 80}, {"protocol": "udp", "port": 80}]`
		for _, row := range []struct {
			pod           *testenv.Pod
			admits, after string
			reason        maps.Reason
		}{
			{web, `{"ingress": [{"from": [{"sameNetwork": true}], ` + ports + `}], "egress": []}`, `{"ingress": []}`, reasonPolicy},
			{a, `{"egress": [{"to": [{"sameNetwork": true}], ` + ports + `}], "ingress": []}`, `{"egress": [{"to": [{"cidr": "172.30.0.0/16"}, {"cidr": "fd00:30::/32"}]}]}`, reasonPolicyEgress},
		} {
			client := connect(t, a.Namespace, protocol, netip.AddrPort{}, at(serviceAddrs[f.Name], 80))
			defer client.Close()
			n.eventuallyOffloads(t, f, client, web.Namespace)
			n.setPolicy(t, row.pod, row.admits)
			n.eventuallyOffloads(t, f, client, web.Namespace)
			acknowledged(t, a.Namespace, web.Namespace)
			n.setPolicy(t, row.pod, row.after)
			n.wantEnded(t, row.after, client, row.pod, row.reason)
			n.setPolicy(t, row.pod, `{"ingress": [{}], "egress": [{}]}`)
		}
	})
}
