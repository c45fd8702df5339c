package scenario

import (
	"errors"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// sibling is the address that differs from addr in its last byte.
func sibling(addr netip.Addr, last byte) netip.Addr {
	bytes := addr.AsSlice()
	bytes[len(bytes)-1] = last
	sibling, _ := netip.AddrFromSlice(bytes)
	return sibling
}

// A host port is closed as soon as DEL has returned.
func TestHostPortCloses(t *testing.T) {
	n := newNetwork(t)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		web := n.AddPod(t, "web", mapBoth(8080, 80))
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
		del(t, web)
		isRefused(t, n.Outside, protocol, at(f.node, 8080))
	})
}

// The next pod has the port as soon as ADD has returned, also for clients that keep one
// UDP socket, as resolvers and game clients do: no state from before leads them astray.
func TestHostPortIsTakenOver(t *testing.T) {
	n := newNetwork(t)
	inEachFamily(t, func(t *testing.T, f family) {
		old := n.AddPod(t, "old", mapBoth(8080, 80))
		serve(t, old.Namespace, "udp", at(f.pod(old), 80))
		serve(t, old.Namespace, "tcp", at(f.pod(old), 80))
		client := connect(t, n.Outside, "udp", netip.AddrPort{}, at(f.node, 8080))
		defer client.Close()
		if seen := ask(t, client, old.Namespace); seen != client.Local() {
			t.Errorf("the old pod sees %s, want %s", seen, client.Local())
		}
		reachAsOneself(t, n.Outside, "tcp", at(f.node, 8080), old.Namespace)
		del(t, old)
		if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("between the pods: %v, want a refusal", err)
		}

		next := n.AddPod(t, "next", mapBoth(8080, 80))
		defer del(t, next)
		serve(t, next.Namespace, "udp", at(f.pod(next), 80))
		serve(t, next.Namespace, "tcp", at(f.pod(next), 80))
		if seen := ask(t, client, next.Namespace); seen != client.Local() {
			t.Errorf("the next pod sees %s, want %s", seen, client.Local())
		}
		reachAsOneself(t, n.Outside, "tcp", at(f.node, 8080), next.Namespace)
	})
}

// The same with a container port that differs, and the next pod in place of a pod whose DEL
// the client never noticed.
func TestHostPortIsTakenOverUnnoticed(t *testing.T) {
	n := newNetwork(t)
	inEachFamily(t, func(t *testing.T, f family) {
		old := n.AddPod(t, "old", mapBoth(8080, 80))
		serve(t, old.Namespace, "udp", at(f.pod(old), 80))
		client := connect(t, n.Outside, "udp", netip.AddrPort{}, at(f.node, 8080))
		defer client.Close()
		ask(t, client, old.Namespace)
		del(t, old)

		next := n.AddPod(t, "next", mapBoth(8080, 81))
		defer del(t, next)
		serve(t, next.Namespace, "udp", at(f.pod(next), 81))
		if seen := ask(t, client, next.Namespace); seen != client.Local() {
			t.Errorf("the next pod sees %s, want %s", seen, client.Local())
		}
	})
}

// A host port that a living pod has is refused to others, who learn whose it is; the pod
// that has it does not notice.
func TestHostPortIsKept(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	late := n.NewPod(t, "late")
	late.Conf.CapabilityArgs = mapBoth(8080, 80)

	err := late.Add(testenv.Context(t))
	var cniError *cnitypes.Error
	const codePortTaken = 103
	if !errors.As(err, &cniError) || cniError.Code != codePortTaken {
		t.Fatalf("second pod with the same port: %v, want code %d", err, codePortTaken)
	}
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
	})
	del(t, late)
	inEachFamily(t, func(t *testing.T, f family) {
		serve(t, web.Namespace, "tcp", at(f.pod(web), 80))
		reachAsOneself(t, n.Outside, "tcp", at(f.node, 8080), web.Namespace)
	})
}

// The same for every kind of client, each with a socket that it never stops using.
func TestHostPortIsTakenOverForLocalClients(t *testing.T) {
	n := newNetwork(t)
	neighbour := n.AddPod(t, "neighbour", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		var clients []*testenv.Client
		for _, from := range []struct {
			ns *testenv.Namespace
			to netip.Addr
		}{
			{n.Outside, f.node}, {n.node(), f.node}, {n.node(), f.loopbacks()[0]}, {neighbour.Namespace, f.gateway},
		} {
			client := connect(t, from.ns, "udp", netip.AddrPort{}, at(from.to, 8080))
			defer client.Close()
			clients = append(clients, client)
		}
		for i := range 3 {
			pod := n.AddPod(t, "turn", mapBoth(8080, uint16(80+i)))
			serve(t, pod.Namespace, "udp", at(f.pod(pod), uint16(80+i)))
			for _, client := range clients {
				ask(t, client, pod.Namespace)
			}
			del(t, pod)
			for _, client := range clients {
				if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("after DEL, %s asks: %v, want a refusal", client.Local(), err)
				}
			}
		}
	})
}

// DEL ends connections as well: the clients are told, and need not find out.
func TestHostPortClosesForConnections(t *testing.T) {
	n := newNetwork(t)
	neighbour := n.AddPod(t, "neighbour", nil)
	inEachFamily(t, func(t *testing.T, f family) {
		web := n.AddPod(t, "web", mapBoth(8080, 80))
		serve(t, web.Namespace, "tcp", at(f.pod(web), 80))
		var clients []*testenv.Client
		for from, to := range map[*testenv.Namespace]netip.Addr{
			n.Outside: f.node, n.node(): f.loopbacks()[0], neighbour.Namespace: f.node,
		} {
			client := connect(t, from, "tcp", netip.AddrPort{}, at(to, 8080))
			defer client.Close()
			ask(t, client, web.Namespace)
			clients = append(clients, client)
		}
		del(t, web)
		for _, client := range clients {
			if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("after DEL, %s asks: %v, want a reset", client.Local(), err)
			}
		}
	})
}

// What the outside still sends to a container that is gone does not reach the next one with
// its address; and the port that the old one had for a remote is free for the next one.
func TestAddressIsTakenOver(t *testing.T) {
	n := newNetworkOf(t, strings.Replace(allVerbsConflist, `{"portMappings": true}`, `{"portMappings": true, "ips": true}`, 1))
	inEachFamily(t, func(t *testing.T, f family) {
		remote := listenPacket(t, n.Outside, at(f.outside, 9000))
		old := n.AddPod(t, "old", nil)
		client := at(f.pod(old), 4000)
		sendTo(t, listenPacket(t, old.Namespace, client), at(f.outside, 9000), "from the old")
		_, leaves := receiveFrom(t, remote)
		addrs := []string{old.Addr4().String(), old.Addr6().String()}
		del(t, old)

		next := n.AddPod(t, "next", map[string]any{"ips": addrs})
		defer del(t, next)
		socket := listenPacket(t, next.Namespace, client)
		sendTo(t, remote, leaves, "for the old")
		sendTo(t, socket, at(f.outside, 9000), "from the next")
		if payload, from := receiveFrom(t, remote); payload != "from the next" || from != leaves {
			t.Errorf("the remote got %q from %s, want it from %s", payload, from, leaves)
		}
		sendTo(t, remote, leaves, "for the next")
		if payload, _ := receiveFrom(t, socket); payload != "for the next" {
			t.Errorf("the next pod got %q", payload)
		}
	})
	if err := n.GC(testenv.Context(t)); err != nil {
		t.Fatal(err)
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, flow := range append(must(maps.Flows(datapath)), must(maps.FlowsBackup(datapath))...) {
			t.Errorf("left behind by GC: %s", flow)
		}
	})
}
