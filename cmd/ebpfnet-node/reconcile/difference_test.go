package reconcile

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

const tunnelIndex = 9

var (
	gateway4 = netip.MustParsePrefix("10.244.1.1/32")
	gateway6 = netip.MustParsePrefix("fd44:1::1/128")
)

// desiredState has the tunnel device and routes to three prefixes.
func desiredState() *desired.State {
	return &desired.State{
		Device: &desired.Device{Name: "ebpfnet0", MAC: "02:00:00:00:00:01", MTU: 1450, Addresses: []netip.Prefix{gateway4, gateway6},
			Tunnel: maps.Tunnel{VNI: 7, Port: 4789}},
		Routes: []rtnl.NodeRoute{tunnelRoute(2, 0), tunnelRoute(3, 0), directRoute(4)},
		Nodes:  []maps.Node{peer(2), peer(3), peer(4)},
	}
}

func podCIDR(n int) netip.Prefix { return netip.MustParsePrefix(fmt.Sprintf("10.244.%d.0/24", n)) }
func address(n int) netip.Addr   { return netip.MustParseAddr(fmt.Sprintf("192.0.2.%d", n)) }

func tunnelRoute(n, device int) rtnl.NodeRoute {
	return rtnl.NodeRoute{Prefix: podCIDR(n), Device: device, Source: gateway4.Addr(), Tunnel: rtnl.Tunnel{ID: 7, Local: address(1), Remote: address(n)}}
}

func directRoute(n int) rtnl.NodeRoute {
	return rtnl.NodeRoute{Prefix: podCIDR(n), Device: 2, Gateway: address(n)}
}

func peer(n int) maps.Node {
	return maps.Node{Prefix: podCIDR(n), Remote: address(n), Mode: maps.NodeTunnel}
}

// presentState is what a host has after desiredState.
func presentState() *Present {
	return &Present{
		Device: &Device{Index: tunnelIndex, Name: "ebpfnet0", Kind: "vxlan", Ours: true, External: true, Up: true, NoARP: true,
			Port: 4789, MAC: "02:00:00:00:00:01", MTU: 1450, Addresses: []netip.Prefix{gateway6, gateway4}},
		Tunnel: maps.Tunnel{IfIndex: tunnelIndex, VNI: 7, Port: 4789},
		Routes: []rtnl.NodeRoute{directRoute(4), tunnelRoute(3, tunnelIndex), tunnelRoute(2, tunnelIndex)},
		Nodes:  []maps.Node{peer(4), peer(2), peer(3)},
	}
}

// TestDifference requires changes of what differs, and no others.
func TestDifference(t *testing.T) {
	all := []netip.Prefix{gateway4, gateway6}
	foreign := directRoute(200)
	moved := tunnelRoute(2, tunnelIndex)
	moved.Tunnel.Remote = address(22)
	for _, test := range []struct {
		name   string
		change func(want *desired.State, have *Present)
		want   Changes
	}{
		{"nothing", func(*desired.State, *Present) {}, Changes{}},
		{"first start", func(_ *desired.State, have *Present) { *have = Present{} },
			Changes{CreateDevice: true, SetTunnel: true, AddAddresses: all, SetNodes: true,
				Add: []rtnl.NodeRoute{tunnelRoute(2, 0), tunnelRoute(3, 0), directRoute(4)}}},
		{"device deleted", func(_ *desired.State, have *Present) {
			have.Device, have.Routes = nil, []rtnl.NodeRoute{directRoute(4)}
		}, Changes{CreateDevice: true, SetTunnel: true, AddAddresses: all, Add: []rtnl.NodeRoute{tunnelRoute(2, 0), tunnelRoute(3, 0)}}},
		{"device of another port", func(_ *desired.State, have *Present) { have.Device.Port = 8472 },
			Changes{DeleteDevice: true, CreateDevice: true, SetTunnel: true, AddAddresses: all, Add: []rtnl.NodeRoute{tunnelRoute(2, 0), tunnelRoute(3, 0)}}},
		{"device of another name", func(want *desired.State, _ *Present) { want.Device.Name = "tunnel0" },
			Changes{DeleteDevice: true, CreateDevice: true, SetTunnel: true, AddAddresses: all, Add: []rtnl.NodeRoute{tunnelRoute(2, 0), tunnelRoute(3, 0)}}},
		{"device with remotes of its own", func(_ *desired.State, have *Present) { have.Device.External = false },
			Changes{DeleteDevice: true, CreateDevice: true, SetTunnel: true, AddAddresses: all, Add: []rtnl.NodeRoute{tunnelRoute(2, 0), tunnelRoute(3, 0)}}},
		{"device no longer desired", func(want *desired.State, _ *Present) {
			want.Device, want.Routes = nil, []rtnl.NodeRoute{directRoute(4)}
		}, Changes{DeleteDevice: true, SetTunnel: true}},
		{"device without its alias", func(_ *desired.State, have *Present) { have.Device.Ours = false }, Changes{SetDevice: true}},
		{"device without ours", func(want *desired.State, have *Present) { // mode direct, beside somebody's device
			want.Device, want.Routes = nil, []rtnl.NodeRoute{directRoute(4)}
			have.Device.Ours, have.Routes, have.Tunnel = false, want.Routes, maps.Tunnel{}
		}, Changes{}},
		{"another VNI", func(want *desired.State, _ *Present) { want.Device.Tunnel.VNI = 8 }, Changes{SetTunnel: true}},
		{"another source of the tunnel", func(want *desired.State, _ *Present) { want.Device.Tunnel.Addr4 = netip.MustParseAddr("192.0.2.11") },
			Changes{SetTunnel: true}},
		{"datapath loaded anew", func(_ *desired.State, have *Present) { have.Tunnel, have.Nodes = maps.Tunnel{}, nil },
			Changes{SetTunnel: true, SetNodes: true}},
		{"device down", func(_ *desired.State, have *Present) { have.Device.Up = false }, Changes{SetDevice: true}},
		{"device with ARP", func(_ *desired.State, have *Present) { have.Device.NoARP = false }, Changes{SetDevice: true}},
		{"another MTU", func(want *desired.State, _ *Present) { want.Device.MTU = 8950 }, Changes{SetDevice: true}},
		{"another MAC", func(_ *desired.State, have *Present) { have.Device.MAC = "02:00:00:00:00:02" }, Changes{SetDevice: true}},
		{"address gone", func(_ *desired.State, have *Present) { have.Device.Addresses = have.Device.Addresses[:1] },
			Changes{AddAddresses: []netip.Prefix{gateway4}}},
		{"address left", func(want *desired.State, _ *Present) { want.Device.Addresses = all[:1] },
			Changes{DeleteAddresses: []netip.Prefix{gateway6}}},
		{"routes flushed", func(_ *desired.State, have *Present) { have.Routes = nil },
			Changes{Add: []rtnl.NodeRoute{tunnelRoute(2, tunnelIndex), tunnelRoute(3, tunnelIndex), directRoute(4)}}},
		{"node gone", func(want *desired.State, _ *Present) { want.Routes, want.Nodes = want.Routes[1:], want.Nodes[1:] },
			Changes{SetNodes: true, Delete: []rtnl.NodeRoute{tunnelRoute(2, tunnelIndex)}}},
		{"unassigned addresses", func(want *desired.State, have *Present) {
			want.Unassigned, have.Routes = []netip.Prefix{podCIDR(1), podCIDR(7)}, append(have.Routes, refusing([]netip.Prefix{podCIDR(7), podCIDR(8)})...)
		}, Changes{Add: refusing([]netip.Prefix{podCIDR(1)}), Delete: refusing([]netip.Prefix{podCIDR(8)})}},
		{"left by another node", func(_ *desired.State, have *Present) { have.Routes = append(have.Routes, foreign) },
			Changes{Delete: []rtnl.NodeRoute{foreign}}},
		{"another metric", func(_ *desired.State, have *Present) { have.Routes[2].Metric = 5 }, func() Changes {
			stale := tunnelRoute(2, tunnelIndex)
			stale.Metric = 5
			return Changes{Add: []rtnl.NodeRoute{tunnelRoute(2, tunnelIndex)}, Delete: []rtnl.NodeRoute{stale}}
		}()},
		{"node's address changed", func(want *desired.State, _ *Present) {
			want.Routes[0].Tunnel.Remote, want.Nodes[0].Remote = address(22), address(22)
		}, Changes{SetNodes: true, Replace: []rtnl.NodeRoute{moved}}},
		{"from tunnel to direct", func(want *desired.State, _ *Present) {
			want.Routes[0], want.Nodes[0].Mode = directRoute(2), maps.NodeDirect
		},
			Changes{SetNodes: true, Replace: []rtnl.NodeRoute{directRoute(2)}}},
		{"entries lost", func(_ *desired.State, have *Present) { have.Nodes = nil }, Changes{SetNodes: true}},
	} {
		want, have := desiredState(), presentState()
		test.change(want, have)
		got, err := Difference(want, have)
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if !reflect.DeepEqual(got, &test.want) {
			t.Errorf("%s: got %+v, want %+v", test.name, got, test.want)
		}
		if got.IsEmpty() != reflect.DeepEqual(test.want, Changes{}) {
			t.Errorf("%s: got empty %v, with %d changes", test.name, got.IsEmpty(), got.Count())
		}
	}
}

// TestDeviceOfOthers leaves alone a device that somebody else has made with the tunnel's name.
func TestDeviceOfOthers(t *testing.T) {
	for kind, change := range map[string]func(*Device){
		"bridge": func(d *Device) { d.External = false },
		"vxlan":  func(d *Device) { d.MAC = "02:00:00:00:00:02" },
	} {
		have := presentState()
		have.Device.Ours, have.Device.Kind = false, kind
		change(have.Device)
		if got, err := Difference(desiredState(), have); err == nil || !strings.Contains(err.Error(), "ebpfnet0 ("+kind+")") {
			t.Errorf("got changes %+v, error %v, want an error that names the device", got, err)
		}
	}
}

// TestFailures reports a few of many errors.
func TestFailures(t *testing.T) {
	var failed failures
	failed.add(nil)
	if err := failed.err(); err != nil {
		t.Errorf("got error %v, want none", err)
	}
	for n := range 5000 {
		failed.add(fmt.Errorf("route %d", n))
	}
	if got := failed.err().Error(); got != "route 0\nroute 1\nroute 2\nand 4997 more" {
		t.Errorf("got %q", got)
	}
}
