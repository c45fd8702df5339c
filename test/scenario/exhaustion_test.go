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

// fewPorts leaves the node as few ports for masquerading as it can: its own sockets get the rest.
func (n *network) fewPorts(t *testing.T) {
	t.Helper()
	if err := n.node().SetSysctl("net/ipv4/ip_local_port_range", "1024 61439"); err != nil {
		t.Fatal(err)
	}
}

// refused returns how many packets found no port.
func (n *network) refusedFlows(t *testing.T) (packets uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		packets = must(maps.DropTotals(datapath))[bpf.ReasonNoPort].Packets
	})
	return packets
}

// A pod takes all ports that there are for one remote, each of its own flows another one. Then a
// new flow is refused and counted; those that live, and other remotes, do not notice.
func TestPortsRunOut(t *testing.T) {
	n := newNetwork(t)
	n.fewPorts(t)
	greedy, other := n.AddPod(t, "greedy", nil), n.AddPod(t, "other", nil)
	first, last := n.masqPorts(t)
	ports := int(last) - int(first) + 1
	inEachFamily(t, func(t *testing.T, f family) {
		server := serve(t, n.Outside, "udp", at(f.outside, 7000))
		elsewhere := serve(t, n.Outside, "udp", at(f.outside, 7001))
		live := connect(t, other.Namespace, "udp", netip.AddrPort{}, server)
		defer live.Close()
		before := ask(t, live, n.Outside)

		for port := range ports {
			socket, err := greedy.ListenPacket(testenv.Context(t), at(f.pod(greedy), uint16(2000+port)))
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
			taken := map[uint16]bool{}
			for _, flow := range must(maps.Flows(datapath)) {
				if flow.Kind == bpf.FlowSNAT && flow.Remote == server {
					taken[flow.Local.Port()] = true
				}
			}
			if len(taken) != ports {
				t.Fatalf("%d of %d ports are taken", len(taken), ports)
			}
		})

		refused := n.refusedFlows(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		asked := make(chan error, 1)
		go func() {
			answer, err := testenv.Ask(ctx, other.Namespace, "udp", server, "one more")
			if err == nil {
				t.Errorf("one more flow is seen as %s", answer.Peer)
			}
			asked <- err
		}()
		testenv.Eventually(t, "a packet that is counted as refused", func() error {
			if now := n.refusedFlows(t); now <= refused {
				return fmt.Errorf("there are %d, as before", now)
			}
			return nil
		})
		cancel()
		<-asked
		if after := ask(t, live, n.Outside); after != before {
			t.Errorf("the living flow is seen as %s, before as %s", after, before)
		}
		reachAsNode(t, other.Namespace, "udp", elsewhere, n.Outside, f.node)
		reachAsNode(t, greedy.Namespace, "udp", elsewhere, n.Outside, f.node)
	})
	del(t, greedy)
	inEachFamily(t, func(t *testing.T, f family) {
		server := serve(t, n.Outside, "udp", at(f.outside, 7000))
		reachAsNode(t, other.Namespace, "udp", server, n.Outside, f.node)
	})
}

// A million flows of one packet each go through a table of 4,096 while others are busy, and one is
// quiet. None of these breaks.
func TestFlood(t *testing.T) {
	n := newNetworkOf(t, withKeys(`"ipMasq": true, "maxFlows": 4096`))
	a, web, bad := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "bad", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		paths := n.paths(f, a, web, 80)
		c := &connections{server: n.Outside}
		var hosted []*testenv.Client
		for _, protocol := range []string{"tcp", "udp"} {
			serve(t, n.Outside, protocol, at(f.outside, 80))
			serve(t, web.Namespace, protocol, at(f.pod(web), 80))
			for _, p := range paths {
				client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
				defer client.Close()
				if p.server == n.Outside {
					c.add(client)
				} else {
					hosted = append(hosted, client)
				}
			}
		}
		quiet := paths[0]
		quiet.listen, quiet.dial = at(f.outside, 81), at(f.outside, 81)
		client, server := connectPair(t, quiet)
		say(t, client, server)

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
			for _, client := range hosted {
				ask(t, client, web.Namespace)
			}
		}
		if rounds < 3 {
			t.Errorf("the flood was over after %d rounds", rounds)
		}
		n.withDatapath(t, func(datapath *loader.Datapath) {
			if flows := len(must(maps.Flows(datapath))); flows < 4096/2 {
				t.Errorf("after the flood there are %d flows only", flows)
			}
		})
		say(t, server, client)
	})
}

// flood sends packets of as many flows to the outside, from a raw socket.
func flood(t *testing.T, pod *testenv.Pod, f family) error {
	const batch = 10_000

	flows := 1_000_000
	if testing.Short() {
		flows = 50_000
	}
	packet := testenv.UDPPacket(at(f.pod(pod), 1), at(f.outside, 1), "")
	packet.SrcMAC, packet.DstMAC = pod.MACOf(t, testenv.PodIfName), hostMACOf(t, pod)
	template, err := packet.Build()
	if err != nil {
		return err
	}
	const udpHeader = 8
	ports := len(template) - udpHeader // the checksum is wrong then, which nobody asks for
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
