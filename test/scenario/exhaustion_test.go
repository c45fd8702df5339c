package scenario

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// fewPorts leaves the minimum of ports for masquerading: the node's own sockets get the rest.
func (n *network) fewPorts(t *testing.T) {
	t.Helper()
	if err := n.node().SetSysctl("net/ipv4/ip_local_port_range", "1024 61439"); err != nil {
		t.Fatal(err)
	}
}

// noPortDrops counts the packets that were dropped for lack of a port.
func (n *network) noPortDrops(t *testing.T) uint64 {
	t.Helper()
	return n.dropsFor(t, bpf.ReasonNoPort)
}

// dropsFor counts the packets that were dropped for a reason.
func (n *network) dropsFor(t *testing.T, reason bpf.Reason) (packets uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		packets = must(maps.DropTotals(datapath))[reason].Packets
	})
	return packets
}

// Pods' flows occupy nearly all ports towards one remote, and one pod's no more than its share. Further ones take the
// place of its own that were answered, or are dropped and counted; other pods' flows and other remotes are not affected.
func TestMasqueradePortsExhausted(t *testing.T) {
	n := newNetwork(t)
	n.fewPorts(t)
	greedy, other := n.AddPod(t, "greedy", nil), n.AddPod(t, "other", nil)
	third, late := n.AddPod(t, "third", nil), n.AddPod(t, "late", nil)
	ports := n.countMasqPorts(t)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := serve(t, n.Outside, "udp", at(f.Outside, 7000))
		elsewhere := serve(t, n.Outside, "udp", at(f.Outside, 7001))
		live := connect(t, other.Namespace, "udp", netip.AddrPort{}, server)
		defer live.Close()
		seen := ask(t, live, n.Outside)

		sent := 2 * ports // finds all that one pod may have
		silent := listenSilently(t, n.Outside, at(f.Outside, 7002))
		for remote, isDropped := range map[netip.AddrPort]bool{silent: true, server: false} {
			before := n.noPortDrops(t)
			openFlows(t, greedy, f, remote, sent, !isDropped)
			own := 0
			within(t, "the last packet", func() error {
				own = n.portsInUse(t, remote)[f.Pod(greedy)]
				want := 0
				if isDropped {
					want = sent - own
				}
				if drops := n.noPortDrops(t) - before; drops != uint64(want) {
					return fmt.Errorf("drops of %d flows to %s that got %d ports: got %d, want %d", sent, remote, own, drops, want)
				}
				return nil
			})
			if own < ports*70/100 || own > ports*80/100 {
				t.Fatalf("ports of one pod to %s: got %d of %d, want 70 %% to 80 %%", remote, own, ports)
			}
		}
		reachAsNode(t, late.Namespace, "udp", server, n.Outside, f.Node)
		if after := ask(t, live, n.Outside); after != seen {
			t.Errorf("another pod's flow: server sees %s, want %s as before", after, seen)
		}

		for _, pod := range []*testenv.Pod{other, third} {
			openFlows(t, pod, f, server, sent, false)
		}
		all := 0
		for _, used := range n.portsInUse(t, server) {
			all += used
		}
		if all < ports*95/100 || all > ports {
			t.Errorf("ports of all pods: got %d of %d, want at least 95 %%", all, ports)
		}
		ask(t, live, n.Outside) // its own pod's flows may have taken its port
		for _, pod := range []*testenv.Pod{greedy, other, late} {
			reachAsNode(t, pod.Namespace, "udp", elsewhere, n.Outside, f.Node)
		}
	})
	del(t, greedy)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := serve(t, n.Outside, "udp", at(f.Outside, 7000))
		reachAsNode(t, late.Namespace, "udp", server, n.Outside, f.Node)
	})
}

// listenSilently opens a socket by which nobody answers.
func listenSilently(t *testing.T, namespace *testenv.Namespace, addr netip.AddrPort) netip.AddrPort {
	t.Helper()
	socket, err := namespace.ListenPacket(testenv.Context(t), addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { socket.Close() })
	return addr
}

// openFlows sends one datagram from each of so many ports of a pod, and waits for its answer if there is one.
func openFlows(t *testing.T, pod *testenv.Pod, f testenv.Family, to netip.AddrPort, flows int, answered bool) {
	t.Helper()
	answer := make([]byte, 256)
	for i := range flows {
		socket, err := pod.ListenPacket(testenv.Context(t), at(f.Pod(pod), uint16(2000+i)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := socket.WriteToUDPAddrPort([]byte("x"), to); err != nil {
			t.Fatal(err)
		}
		if answered {
			err := socket.SetReadDeadline(time.Now().Add(testenv.Timeout))
			if _, _, readErr := socket.ReadFromUDPAddrPort(answer); errors.Join(err, readErr) != nil {
				t.Fatalf("flow %d: %v", i, errors.Join(err, readErr))
			}
		}
		if err := socket.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// portsInUse counts the ports that flows to the remote have, by container address.
func (n *network) portsInUse(t *testing.T, remote netip.AddrPort) map[netip.Addr]int {
	t.Helper()
	owner := map[uint16]netip.Addr{}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, flow := range must(maps.Flows(datapath)) {
			if flow.Kind != bpf.FlowSNAT || flow.Remote != remote {
				continue
			}
			if other, taken := owner[flow.Local.Port()]; taken {
				t.Errorf("port %d: %s and %s have it", flow.Local.Port(), other, flow.NAT.Addr())
			}
			owner[flow.Local.Port()] = flow.NAT.Addr()
		}
	})
	count := map[netip.Addr]int{}
	for _, addr := range owner {
		count[addr]++
	}
	return count
}

// A million flows of one packet each pass a table of 4,096 entries. Neither busy connections nor an idle one
// break.
func TestFlowFlood(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "maxFlows": 4096`))
	a, web, bad := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "bad", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		paths := n.translatedPaths(f, a, web)
		c := &connections{server: n.Outside}
		var inbound []*testenv.Client
		for _, protocol := range []string{"tcp", "udp"} {
			serve(t, n.Outside, protocol, at(f.Outside, 80))
			serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
			for _, p := range paths {
				client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
				defer client.Close()
				if p.server == n.Outside {
					c.add(client)
				} else {
					inbound = append(inbound, client)
				}
			}
		}
		idle := paths[0]
		idle.listen, idle.dial = at(f.Outside, 81), at(f.Outside, 81)
		client, server := connectPair(t, idle)
		sendByte(t, client, server)

		flooded := make(chan error, 1)
		start := func() { flooded <- flood(t, bad, f) }
		go start()
		rounds := 0
		for done := false; !done; rounds++ {
			select {
			case err := <-flooded:
				if err != nil {
					t.Fatal(err)
				}
				if done = rounds >= 3; !done { // once more: the requests take longer here
					go start()
				}
			default:
			}
			c.ask(t)
			for _, client := range inbound {
				ask(t, client, web.Namespace)
			}
		}
		n.withDatapath(t, func(datapath *loader.Datapath) {
			if flows := len(must(maps.Flows(datapath))); flows < 4096/2 {
				t.Errorf("flows after the flood: got %d, want at least 2048", flows)
			}
		})
		sendByte(t, server, client)
	})
}

// flood sends one packet for each of many flows from the pod to the outside.
func flood(t *testing.T, pod *testenv.Pod, f testenv.Family) error {
	const batch = 10_000

	flows := workload(50_000, 200_000, 1_000_000)
	packet := testenv.UDPPacket(at(f.Pod(pod), 1), at(f.Outside, 1), "")
	packet.SrcMAC, packet.DstMAC = pod.MACOf(t, testenv.PodIfName), hostMACOf(t, pod)
	template, err := packet.Build()
	if err != nil {
		return err
	}
	const udpHeader = 8
	ports := len(template) - udpHeader // leaves a wrong checksum, which nothing verifies
	frames := make([][]byte, batch)
	for i := range frames {
		frames[i] = bytes.Clone(template)
	}
	random := uint32(1)
	for range flows / batch {
		for _, frame := range frames {
			random = random*1664525 + 1013904223 // every value once (Numerical Recipes)
			binary.BigEndian.PutUint32(frame[ports:], random|1<<16|1)
		}
		if err := pod.SendFrames(testenv.PodIfName, frames...); err != nil {
			return err
		}
	}
	return nil
}
