package scenario

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Errors that hosts and routers send back are for whom the packet came from, and
// quote what that one has sent.

// A socket is told that nobody listens, in every direction that is translated.
func TestPortUnreachable(t *testing.T) {
	n := newNetwork(t)
	n.AddFar(t, 0)
	web, other := n.AddPod(t, "web", mapBoth(8080, 80)), n.AddPod(t, "other", nil)
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		isRefused(t, other.Namespace, protocol, at(f.outside, 9))
		isRefused(t, other.Namespace, protocol, at(f.far, 9))
		isRefused(t, n.Outside, protocol, at(f.node, 8080))
		isRefused(t, n.Far, protocol, at(f.node, 8080))
		isRefused(t, n.node(), protocol, at(f.node, 8080))
		isRefused(t, n.node(), protocol, at(f.loopbacks()[0], 8080))
		isRefused(t, other.Namespace, protocol, at(f.node, 8080))
		isRefused(t, web.Namespace, protocol, at(f.gateway, 8080))
	})
}

// traceroute in a pod shows each hop, and from far away the way to a host port.
func TestTraceroute(t *testing.T) {
	requireTool(t, "traceroute", "traceroute")
	n := newNetwork(t)
	n.AddFar(t, 0)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	inEachFamily(t, func(t *testing.T, f family) {
		hops := []netip.Addr{f.gateway, f.outside, f.router, f.far}
		for _, mode := range [][]string{{}, {"-I"}, {"-T", "-p", "80"}} {
			traceroute(t, web.Namespace, f.far, hops, mode...)
		}
		// What answers for the host port is the node, whose hop the pod's is.
		back := []netip.Addr{f.far.Prev(), f.router.Prev(), f.node, f.node}
		traceroute(t, n.Far, f.node, back, "-T", "-p", "8080")
		traceroute(t, n.Far, f.node, back, "-U", "-p", "8080")
	})
}

// traceroute compares the hops that one probe for each finds.
func traceroute(t *testing.T, from *testenv.Namespace, to netip.Addr, want []netip.Addr, mode ...string) {
	t.Helper()
	args := append([]string{"-n", "-q", "1", "-N", "1", "-w", "10", "-m", "8"}, mode...)
	output, err := from.Run(testenv.Context(t), "traceroute", append(args, to.String())...)
	if err != nil {
		t.Errorf("%v", err)
		return
	}
	var hops []netip.Addr
	for i, line := range strings.Split(strings.TrimSpace(output), "\n") {
		if fields := strings.Fields(line); i > 0 && len(fields) > 1 {
			hop, _ := netip.ParseAddr(fields[1]) // the zero Addr for "*"
			hops = append(hops, hop)
		}
	}
	if !slices.Equal(hops, want) {
		t.Errorf("traceroute %s from %s shows %v, want %v:\n%s", strings.Join(mode, " "), from.Name, hops, want, output)
	}
}

// A link far away takes only smaller packets than both ends, who learn of it by an error
// of the router in front of it: without that the transfer stands still.
func TestSmallerMTUFarAway(t *testing.T) {
	for _, mtu := range []int{1280, 1400} {
		for _, offloads := range []bool{true, false} {
			t.Run(fmt.Sprintf("MTU %d, offloads %v", mtu, offloads), func(t *testing.T) {
				n := newNetwork(t)
				n.AddFar(t, mtu)
				a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
				if !offloads {
					n.setOffloadsOff(t, a, web)
				}
				inEachFamily(t, func(t *testing.T, f family) {
					onWeb, onFar := at(f.pod(web), 80), at(f.far, 80)
					for _, send := range []transfer{upload(sizeOf(4 * mebibyte)), download(sizeOf(4 * mebibyte))} {
						send(t, a.Namespace, n.Far, onFar, onFar)
						send(t, n.Far, web.Namespace, onWeb, at(f.node, 8080))
					}
				})
			})
		}
	}
}

// setOffloadsOff makes every packet on the way from pods to far what it is on a wire.
func (n *network) setOffloadsOff(t *testing.T, pods ...*testenv.Pod) {
	t.Helper()
	set := func(ns *testenv.Namespace, device string) {
		if err := ns.SetOffloads(device, false); err != nil {
			t.Fatal(err)
		}
	}
	for _, pod := range pods {
		set(pod.Namespace, testenv.PodIfName)
		set(n.node(), pod.Result.Interfaces[0].Name)
	}
	for _, ns := range []*testenv.Namespace{n.node(), n.Outside, n.Router, n.Far} {
		set(ns, testenv.UplinkName)
	}
	set(n.Outside, testenv.FarName)
	set(n.Router, testenv.FarName)
}
