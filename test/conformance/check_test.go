package conformance

import (
	"net"
	"os"
	"path/filepath"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// difference is something that CHECK must find.
type difference struct {
	name   string
	damage func(t *testing.T, p *pod, result *types100.Result)
	words  []string // in the error
}

func TestCheck(t *testing.T) {
	checkFinds(t, []difference{
		{"interface deleted", deleteInterface, []string{"eth0"}},
		{"interface down", inContainer((*netlink.Handle).LinkSetDown), []string{"eth0", "down"}},
		{"IPv4 address removed", removeAddress(0), []string{"eth0", "10.88.0."}},
		{"IPv6 address removed", removeAddress(1), []string{"eth0", "fd00:88::"}},
		{"IPv4 route removed", removeRoute("0.0.0.0/0"), []string{"route", "0.0.0.0/0"}},
		{"IPv6 route removed", removeRoute("::/0"), []string{"route", "::/0"}},
		{"MAC changed", inContainer(func(h *netlink.Handle, l netlink.Link) error {
			return h.LinkSetHardwareAddr(l, net.HardwareAddr{2, 0, 0, 0, 0, 9})
		}), []string{"MAC", "eth0", "02:00:00:00:00:09"}},
		{"MTU changed", inContainer(func(h *netlink.Handle, l netlink.Link) error {
			return h.LinkSetMTU(l, 1300)
		}), []string{"MTU", "eth0", "1300", "1500"}},
		{"host's end down", hostEndDown, []string{"ebpf", "down"}},
		{"gateway's address removed", removeGateway, []string{"ebpf", "gateway", "10.88.0.1"}},
		{"host's route removed", removeHostRoute, []string{"route", "fd00:88::", "ebpf"}},
		{"endpoint removed", removeEntries((*maps.Store).Release), []string{"10.88.0.", "fd00:88::"}},
		{"ports removed", removeEntries((*maps.Store).ClosePorts), []string{"port", "0.0.0.0:8080", "[::]:8080"}},
		{"reservation removed", removeReservation, []string{"10.88.0.", "reserved"}},
		{"program removed from the host's end", removeFilter, []string{"ebpf", "programs"}},
	})
}

func TestCheckPrograms(t *testing.T) {
	testenv.Require(t, testenv.TCX) // without, programs have no pin that detaches them
	checkFinds(t, []difference{
		{"program detached from lo", removePin("host-from_host"), []string{"loopback", "program"}},
	})
}

func checkFinds(t *testing.T, differences []difference) {
	t.Helper()
	h := newHost(t)
	conf := with(dual("1.1.0"), "runtimeConfig.portMappings", webPort)
	for _, test := range differences {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", conf)
			before := h.state(t, p.Namespace)
			result := p.add(t)
			wantSuccess(t, p.try(t, "CHECK"), "")
			test.damage(t, p, result)
			wantError(t, p.try(t, "CHECK"), plugin.CodeDiffers, test.words...)
			p.del(t)
			h.wantState(t, before, p.Namespace)
		})
	}
}

func inContainer(damage func(*netlink.Handle, netlink.Link) error) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		if err := damage(p.Netlink(), p.device(t)); err != nil {
			t.Fatal(err)
		}
	}
}

// deleteInterface takes the name away and leaves the pair, so that only the container differs.
func deleteInterface(t *testing.T, p *pod, _ *types100.Result) {
	t.Helper()
	link := p.device(t)
	if err := p.Netlink().LinkSetDown(link); err != nil {
		t.Fatal(err)
	}
	if err := p.Netlink().LinkSetName(link, "gone"); err != nil {
		t.Fatal(err)
	}
}

func removeAddress(index int) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, result *types100.Result) {
		t.Helper()
		addr := result.IPs[index].Address
		if err := p.Netlink().AddrDel(p.device(t), &netlink.Addr{IPNet: &addr}); err != nil {
			t.Fatal(err)
		}
	}
}

func removeRoute(dst string) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		_, prefix, _ := net.ParseCIDR(dst)
		if err := p.Netlink().RouteDel(&netlink.Route{Dst: prefix, LinkIndex: p.device(t).Attrs().Index}); err != nil {
			t.Fatal(err)
		}
	}
}

func removeGateway(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	addr := &netlink.Addr{IPNet: &net.IPNet{IP: result.IPs[0].Gateway, Mask: net.CIDRMask(32, 32)}}
	if err := p.host.Node.Netlink().AddrDel(p.hostDevice(t, result), addr); err != nil {
		t.Fatal(err)
	}
}

func removeHostRoute(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	route := &netlink.Route{
		LinkIndex: p.hostDevice(t, result).Attrs().Index,
		Dst:       &net.IPNet{IP: result.IPs[1].Address.IP, Mask: net.CIDRMask(128, 128)},
	}
	if err := p.host.Node.Netlink().RouteDel(route); err != nil {
		t.Fatal(err)
	}
}

func hostEndDown(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	if err := p.host.Node.Netlink().LinkSetDown(p.hostDevice(t, result)); err != nil {
		t.Fatal(err)
	}
}

func removePin(pattern string) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, _ *pod, _ *types100.Result) {
		t.Helper()
		pins, err := filepath.Glob(filepath.Join(loader.Root, "netns-*", "links", pattern))
		if err != nil || len(pins) != 1 {
			t.Fatalf("pins %s: %v, %v", pattern, pins, err)
		}
		if err := os.Remove(pins[0]); err != nil {
			t.Fatal(err)
		}
	}
}

func removeFilter(t *testing.T, p *pod, result *types100.Result) {
	t.Helper()
	if _, err := p.host.Node.Run(testenv.Context(t), "tc", "filter", "del", "dev", result.Interfaces[0].Name, "ingress"); err != nil {
		t.Fatal(err)
	}
}

func removeEntries(remove func(*maps.Store, loader.Owner) error) func(*testing.T, *pod, *types100.Result) {
	return func(t *testing.T, p *pod, _ *types100.Result) {
		t.Helper()
		owner := maps.Attachment{Network: "pods", ContainerID: p.id, IfName: p.ifName}.Owner()
		err := p.host.Node.Do(func() error {
			datapath, err := loader.OpenLoaded()
			if err != nil {
				return err
			}
			defer datapath.Close()
			return maps.With(testenv.Context(t), datapath, func(store *maps.Store) error { return remove(store, owner) })
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func removeReservation(t *testing.T, _ *pod, result *types100.Result) {
	t.Helper()
	if err := os.Remove(filepath.Join(addressDir, "pods", addresses(result)[0].String())); err != nil {
		t.Fatal(err)
	}
}
