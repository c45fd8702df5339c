package scenario

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"testing"

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
func (n *network) noPortDrops(t *testing.T) (packets uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		packets = must(maps.DropTotals(datapath))[bpf.ReasonNoPort].Packets
	})
	return packets
}

// A pod's flows occupy all ports towards one remote. A new flow is then dropped and counted; live flows and
// other remotes are not affected.
func TestMasqueradePortsExhausted(t *testing.T) {
	n := newNetwork(t)
	n.fewPorts(t)
	greedy, other := n.AddPod(t, "greedy", nil), n.AddPod(t, "other", nil)
	first, last := n.masqPorts(t)
	ports := int(last) - int(first) + 1
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := serve(t, n.Outside, "udp", at(f.Outside, 7000))
		elsewhere := serve(t, n.Outside, "udp", at(f.Outside, 7001))
		live := connect(t, other.Namespace, "udp", netip.AddrPort{}, server)
		defer live.Close()
		seen := ask(t, live, n.Outside)

		for port := range ports {
			socket, err := greedy.ListenPacket(testenv.Context(t), at(f.Pod(greedy), uint16(2000+port)))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := socket.WriteToUDPAddrPort([]byte("x"), server); err != nil {
				t.Fatal(err)
			}
			if err := socket.Close(); err != nil {
				t.Fatal(err)
			}
		}
		n.withDatapath(t, func(datapath *loader.Datapath) {
			used := map[uint16]bool{}
			for _, flow := range must(maps.Flows(datapath)) {
				if flow.Out && flow.Remote == server {
					used[flow.Local.Port()] = true
				}
			}
			if len(used) != ports {
				t.Fatalf("ports in use: got %d, want all %d", len(used), ports)
			}
		})

		before := n.noPortDrops(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan struct{})
		go func() {
			defer close(done)
			if reply, err := testenv.Ask(ctx, other.Namespace, "udp", server, "one more"); err == nil {
				t.Errorf("flow without a free port: server sees %s, want no packet", reply.Peer)
			}
		}()
		testenv.Eventually(t, "a drop for lack of a port", func() error {
			if now := n.noPortDrops(t); now <= before {
				return fmt.Errorf("got %d drops, want more than %d", now, before)
			}
			return nil
		})
		cancel()
		<-done
		if after := ask(t, live, n.Outside); after != seen {
			t.Errorf("live flow: server sees %s, want %s as before", after, seen)
		}
		reachAsNode(t, other.Namespace, "udp", elsewhere, n.Outside, f.Node)
		reachAsNode(t, greedy.Namespace, "udp", elsewhere, n.Outside, f.Node)
	})
	del(t, greedy)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		server := serve(t, n.Outside, "udp", at(f.Outside, 7000))
		reachAsNode(t, other.Namespace, "udp", server, n.Outside, f.Node)
	})
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
		go func() { flooded <- flood(t, bad, f) }()
		rounds := 0
		for done := false; !done; rounds++ {
			select {
			case err := <-flooded:
				if err != nil {
					t.Fatal(err)
				}
				done = true
			default:
			}
			c.ask(t)
			for _, client := range inbound {
				ask(t, client, web.Namespace)
			}
		}
		if rounds < 3 {
			t.Errorf("flood ended after %d rounds, want at least 3", rounds)
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

	flows := 1_000_000
	if testing.Short() {
		flows = 50_000
	}
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
