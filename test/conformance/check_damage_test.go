package conformance

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf/link"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Damage for CHECK to find.

// withExpected passes CHECK another value of a key than ADD.
func withExpected(key string, value any) func(*testing.T, *pod, *types100.Result) {
	return func(_ *testing.T, p *pod, _ *types100.Result) { p.conf = with(p.conf, key, value) }
}

func removeQueue(h *netlink.Handle, l netlink.Link) error {
	queues, err := rtnl.Qdiscs(h, l)
	if err != nil {
		return err
	}
	for _, queue := range queues {
		if queue.Attrs().Parent == netlink.HANDLE_ROOT {
			return h.QdiscDel(queue)
		}
	}
	return errors.New("device has no root qdisc")
}

func setMAC(h *netlink.Handle, l netlink.Link) error {
	return h.LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 9})
}

func setMTU(mtu int) func(*netlink.Handle, netlink.Link) error {
	return func(h *netlink.Handle, l netlink.Link) error { return h.LinkSetMTU(l, mtu) }
}

func setSysctl(t *testing.T, ns *testenv.Namespace, name, value string) {
	t.Helper()
	testenv.Must(t, ns.SetSysctl(name, value))
}

// disableForwarding turns forwarding off on the node, in both families.
func (h *host) disableForwarding(t *testing.T) {
	t.Helper()
	for _, f := range testenv.Families {
		setSysctl(t, h.Node, f.Forwarding, "0")
	}
}

func stopForwarding(f testenv.Family) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		setSysctl(t, p.host.Node, f.Forwarding, "0")
	}
}

func onHost(damage func(*netlink.Handle, netlink.Link) error) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, result *types100.Result) {
		t.Helper()
		testenv.Must(t, damage(p.host.Node.Netlink(), p.hostDevice(t, result)))
	}
}

func inContainer(damage func(*netlink.Handle, netlink.Link) error) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		testenv.Must(t, damage(p.Netlink(), p.device(t)))
	}
}

// deleteInterface renames the interface, so that the veth remains and only the container differs.
func deleteInterface(t *testing.T, p *pod, _ *types100.Result) {
	t.Helper()
	link := p.device(t)
	testenv.Must(t, p.Netlink().LinkSetDown(link))
	testenv.Must(t, p.Netlink().LinkSetName(link, "renamed"))
}

func removeAddress(index int) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, result *types100.Result) {
		t.Helper()
		addr := result.IPs[index].Address
		testenv.Must(t, p.Netlink().AddrDel(p.device(t), &netlink.Addr{IPNet: &addr}))
	}
}

func removeRoute(dst string) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		_, prefix, _ := net.ParseCIDR(dst)
		testenv.Must(t, p.Netlink().RouteDel(&netlink.Route{Dst: prefix, LinkIndex: p.device(t).Attrs().Index}))
	}
}

func removeGateway(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: result.IPs[0].Gateway, Mask: net.CIDRMask(32, 32)}}
	testenv.Must(t, p.host.Node.Netlink().AddrDel(p.hostDevice(t, result), addr))
}

func removeHostRoute(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	route := &netlink.Route{
		LinkIndex: p.hostDevice(t, result).Attrs().Index,
		Dst:       &net.IPNet{IP: result.IPs[1].Address.IP, Mask: net.CIDRMask(128, 128)},
	}
	testenv.Must(t, p.host.Node.Netlink().RouteDel(route))
}

// changeRoute replaces a route of the container, in any table.
func changeRoute(dst string, change func(*netlink.Route)) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		_, prefix, _ := net.ParseCIDR(dst)
		filter := &netlink.Route{Dst: prefix}
		routes, err := rtnl.Routes(p.Netlink(), netlink.FAMILY_V4, filter, netlink.RT_FILTER_DST|netlink.RT_FILTER_TABLE)
		if err != nil || len(routes) != 1 {
			t.Fatalf("routes to %s: got %v (%v), want one", dst, routes, err)
		}
		route := routes[0]
		testenv.Must(t, p.Netlink().RouteDel(&route))
		change(&route)
		testenv.Must(t, p.Netlink().RouteAdd(&route))
	}
}

func removeFilter(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	if _, err := p.host.Node.Run(testenv.Context(t), "tc", "filter", "del", "dev", result.Interfaces[0].Name, "ingress"); err != nil {
		t.Fatal(err)
	}
}

// linkPin returns the one pinned link that matches a pattern.
func linkPin(t *testing.T, pattern string) string {
	t.Helper()
	pins, err := filepath.Glob(filepath.Join(loader.Root, "netns-*", "links", pattern))
	if err != nil || len(pins) != 1 {
		t.Fatalf("pins like %s: got %v (%v), want one", pattern, pins, err)
	}
	return pins[0]
}

// forceDetach detaches a program and leaves its link pinned.
func forceDetach(pattern string) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, _ *pod, _ *types100.Result) {
		t.Helper()
		l, err := link.LoadPinnedLink(linkPin(t, pattern), nil)
		testenv.Must(t, err)
		defer l.Close()
		testenv.Must(t, l.Detach())
	}
}

func writeReservation(t *testing.T, addr, content string) {
	t.Helper()
	testenv.Must(t, os.WriteFile(filepath.Join(testenv.ReservationDir, "pods", addr), []byte(content), 0o644))
}

func removePin(pattern string) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, _ *pod, _ *types100.Result) {
		t.Helper()
		testenv.Must(t, os.Remove(linkPin(t, pattern)))
	}
}

func removeEntries(remove func(*maps.Store, loader.Owner) error) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		owner := maps.Attachment{Network: "pods", ContainerID: p.id, IfName: p.ifName}.Owner()
		p.host.withDatapath(t, func(datapath *loader.Datapath) error {
			return maps.With(testenv.Context(t), datapath, func(store *maps.Store) error { return remove(store, owner) })
		})
	}
}

// clearPrefixes empties the map prefixes.
func clearPrefixes(t *testing.T, p *pod, _ *types100.Result) {
	t.Helper()
	p.host.withDatapath(t, func(datapath *loader.Datapath) error {
		var key bpf.PrefixKey
		for {
			if err := datapath.Prefixes.NextKey(nil, &key); err != nil {
				return nil // empty
			}
			if err := datapath.Prefixes.Delete(&key); err != nil {
				return err
			}
		}
	})
}

func removeReservation(t *testing.T, _ *pod, result *types100.Result) {
	t.Helper()
	testenv.Must(t, os.Remove(filepath.Join(testenv.ReservationDir, "pods", addresses(result)[0].String())))
}
