package scenario

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

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
