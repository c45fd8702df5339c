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
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// sibling returns addr with another last byte.
func sibling(addr netip.Addr, last byte) netip.Addr {
	bytes := addr.AsSlice()
	bytes[len(bytes)-1] = last
	sibling, _ := netip.AddrFromSlice(bytes)
	return sibling
}

// A host port is closed when DEL returns.
func TestHostPortCloses(t *testing.T) {
	n := newNetwork(t)
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		web := n.AddPod(t, "web", mapBoth(8080, 80))
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		del(t, web)
		wantRefused(t, n.Outside, protocol, at(f.Node, 8080))
	})
}

// A host port is forwarded to the next pod when ADD returns, even for clients that keep one UDP socket, as
// resolvers and game clients do.
func TestHostPortReuse(t *testing.T) {
	n := newNetwork(t)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		old := n.AddPod(t, "old", mapBoth(8080, 80))
		serve(t, old.Namespace, "udp", at(f.Pod(old), 80))
		serve(t, old.Namespace, "tcp", at(f.Pod(old), 80))
		client := connect(t, n.Outside, "udp", netip.AddrPort{}, at(f.Node, 8080))
		defer client.Close()
		if seen := ask(t, client, old.Namespace); seen != client.Local() {
			t.Errorf("old pod sees %s, want %s", seen, client.Local())
		}
		reachUntranslated(t, n.Outside, "tcp", at(f.Node, 8080), old.Namespace)
		del(t, old)
		if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("request between DEL and ADD: %v, want a refusal", err)
		}

		next := n.AddPod(t, "next", mapBoth(8080, 80))
		defer del(t, next)
		serve(t, next.Namespace, "udp", at(f.Pod(next), 80))
		serve(t, next.Namespace, "tcp", at(f.Pod(next), 80))
		if seen := ask(t, client, next.Namespace); seen != client.Local() {
			t.Errorf("next pod sees %s, want %s", seen, client.Local())
		}
		reachUntranslated(t, n.Outside, "tcp", at(f.Node, 8080), next.Namespace)
	})
}

// A client that is idle between DEL and ADD reaches the next pod, on another container port.
func TestHostPortReuseWithIdleClient(t *testing.T) {
	n := newNetwork(t)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		old := n.AddPod(t, "old", mapBoth(8080, 80))
		serve(t, old.Namespace, "udp", at(f.Pod(old), 80))
		client := connect(t, n.Outside, "udp", netip.AddrPort{}, at(f.Node, 8080))
		defer client.Close()
		ask(t, client, old.Namespace)
		del(t, old)

		next := n.AddPod(t, "next", mapBoth(8080, 81))
		defer del(t, next)
		serve(t, next.Namespace, "udp", at(f.Pod(next), 81))
		if seen := ask(t, client, next.Namespace); seen != client.Local() {
			t.Errorf("next pod sees %s, want %s", seen, client.Local())
		}
	})
}

// ADD refuses a host port that a running pod has, and does not disturb that pod.
func TestHostPortConflict(t *testing.T) {
	n := newNetwork(t)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	late := n.NewPod(t, "late")
	late.Conf.CapabilityArgs = mapBoth(8080, 80)

	err := late.Add(testenv.Context(t))
	var cniError *cnitypes.Error
	if !errors.As(err, &cniError) || cniError.Code != cnierr.CodePortTaken {
		t.Fatalf("ADD with a host port in use: got %v, want code %d", err, cnierr.CodePortTaken)
	}
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
	})
	del(t, late)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
		reachUntranslated(t, n.Outside, "tcp", at(f.Node, 8080), web.Namespace)
	})
}

// A host port moves from pod to pod under every kind of client, each of which keeps its socket.
func TestHostPortReuseForLocalClients(t *testing.T) {
	n := newNetwork(t)
	neighbor := n.AddPod(t, "neighbor", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		var clients []*testenv.Client
		for _, from := range []struct {
			ns *testenv.Namespace
			to netip.Addr
		}{
			{n.Outside, f.Node}, {n.node(), f.Node}, {n.node(), f.Loopbacks[0]}, {neighbor.Namespace, f.Gateway},
		} {
			client := connect(t, from.ns, "udp", netip.AddrPort{}, at(from.to, 8080))
			defer client.Close()
			clients = append(clients, client)
		}
		for i := range 3 {
			pod := n.AddPod(t, "turn", mapBoth(8080, uint16(80+i)))
			serve(t, pod.Namespace, "udp", at(f.Pod(pod), uint16(80+i)))
			for _, client := range clients {
				ask(t, client, pod.Namespace)
			}
			del(t, pod)
			for _, client := range clients {
				if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("request from %s after DEL: %v, want a refusal", client.Local(), err)
				}
			}
		}
	})
}

// After DEL, a client's next packet on an open connection gets a reset.
func TestHostPortResetsConnections(t *testing.T) {
	n := newNetwork(t)
	neighbor := n.AddPod(t, "neighbor", nil)
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		web := n.AddPod(t, "web", mapBoth(8080, 80))
		serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
		var clients []*testenv.Client
		for from, to := range map[*testenv.Namespace]netip.Addr{
			n.Outside: f.Node, n.node(): f.Loopbacks[0], neighbor.Namespace: f.Node,
		} {
			client := connect(t, from, "tcp", netip.AddrPort{}, at(to, 8080))
			defer client.Close()
			ask(t, client, web.Namespace)
			clients = append(clients, client)
		}
		del(t, web)
		for _, client := range clients {
			if _, err := client.Ask(testenv.Context(t), "hello"); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("request from %s after DEL: %v, want a reset", client.Local(), err)
			}
		}
	})
}

// Packets that the outside still sends to a deleted container do not reach the next one with its address. The
// next one can use the old one's masqueraded port.
func TestAddressReuse(t *testing.T) {
	n := newNetworkWith(t, strings.Replace(allVerbsConflist, `{"portMappings": true}`, `{"portMappings": true, "ips": true}`, 1))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		remote := listenPacket(t, n.Outside, at(f.Outside, 9000))
		old := n.AddPod(t, "old", nil)
		client := at(f.Pod(old), 4000)
		sendTo(t, listenPacket(t, old.Namespace, client), at(f.Outside, 9000), "from the old")
		_, masqueraded := receiveFrom(t, remote)
		addrs := []string{old.Addr4().String(), old.Addr6().String()}
		del(t, old)

		next := n.AddPod(t, "next", map[string]any{"ips": addrs})
		defer del(t, next)
		socket := listenPacket(t, next.Namespace, client)
		sendTo(t, remote, masqueraded, "for the old")
		sendTo(t, socket, at(f.Outside, 9000), "from the next")
		if payload, from := receiveFrom(t, remote); payload != "from the next" || from != masqueraded {
			t.Errorf("remote: got %q from %s, want %q from %s", payload, from, "from the next", masqueraded)
		}
		sendTo(t, remote, masqueraded, "for the next")
		if payload, _ := receiveFrom(t, socket); payload != "for the next" {
			t.Errorf("next pod: got %q, want %q", payload, "for the next")
		}
	})
	if err := n.GC(testenv.Context(t)); err != nil {
		t.Fatal(err)
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, flow := range append(must(maps.Flows(datapath)), must(maps.FlowsBackup(datapath))...) {
			t.Errorf("flow after GC: %s", flow)
		}
	})
}
