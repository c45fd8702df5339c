package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// node is one of two nodes of a cluster. Pairs are IPv4 and IPv6.
type node struct {
	*testenv.Namespace
	number  int
	addrs   [2]netip.Addr
	subnets [2]netip.Prefix // of its pods
	pod     *testenv.Pod
}

// clusterSubnets contain the pod subnets of all nodes.
var clusterSubnets = [2]netip.Prefix{netip.MustParsePrefix("10.88.0.0/16"), netip.MustParsePrefix("fd00:88::/48")}

func newNode(ns *testenv.Namespace, number int, addr4, addr6 netip.Addr) node {
	return node{
		Namespace: ns, number: number, addrs: [2]netip.Addr{addr4, addr6},
		subnets: [2]netip.Prefix{
			netip.MustParsePrefix(fmt.Sprintf("10.88.%d.0/24", number)), netip.MustParsePrefix(fmt.Sprintf("fd00:88:0:%d::/64", number)),
		},
	}
}

// mac returns the MAC address of a node's device.
func (n node) mac(device int) net.HardwareAddr {
	return net.HardwareAddr{2, 0, 0, 0, byte(device), byte(n.number)}
}

// attachToNodes makes both ends of the uplink nodes, with a pod each.
func (s *setup) attachToNodes(m *testenv.Machine) (err error) {
	nodes := [2]node{
		newNode(s.topology.Node, 1, testenv.NodeAddr4, testenv.NodeAddr6),
		newNode(s.topology.Outside, 2, testenv.OutsideAddr4, testenv.OutsideAddr6),
	}
	for i := range nodes {
		n := &nodes[i]
		runtime, err := s.newRuntime(m, n.Namespace, n.subnets)
		if err != nil {
			return err
		}
		n.pod = runtime.NewPod(m, fmt.Sprintf("on-node-%d", n.number))
		if err := attach(n.pod); err != nil {
			return err
		}
	}
	s.client, s.server = nodes[0].pod, nodes[1].pod
	for i, n := range nodes {
		if err := s.join(n, nodes[1-i]); err != nil {
			return fmt.Errorf("lead %s to the pods of %s: %w", n.Name, nodes[1-i].Name, err)
		}
	}
	return nil
}

// The following functions do what cmd/ebpfnet-node does. Its packages are not used, because their module requires Kubernetes'.

const (
	linkMTU      = 1500
	tunnelMTU    = linkMTU - 50 // VXLAN over IPv4
	tunnelPort   = 4789
	tunnelVNI    = 7
	tunnelDevice = "tunnel"
)

// joinDirectly adds routes to the other node's pods by its addresses.
func joinDirectly(n, other node) error {
	uplink, err := n.Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		return err
	}
	err = n.WithDatapath(func(dp *loader.Datapath) error {
		return within(func(ctx context.Context) error { return setNode(ctx, dp, other, other.addrs, maps.NodeDirect, linkMTU) })
	})
	if err != nil {
		return err
	}
	return n.addRoutes(other, func(i int) rtnl.NodeRoute {
		return rtnl.NodeRoute{Device: uplink.Attrs().Index, Gateway: other.addrs[i]}
	})
}

// joinByTunnel adds routes to the other node's pods by VXLAN over IPv4.
func joinByTunnel(n, other node) error {
	device, err := n.addTunnel()
	if err != nil {
		return err
	}
	err = n.WithDatapath(func(dp *loader.Datapath) error {
		return within(func(ctx context.Context) error {
			err := refresh.Tunnel(ctx, dp, maps.Tunnel{
				IfIndex: device.Attrs().Index, VNI: tunnelVNI, Port: tunnelPort, Addr4: n.addrs[0], Containers4: n.subnets[0], Containers6: n.subnets[1],
			})
			if err != nil {
				return err
			}
			return setNode(ctx, dp, other, [2]netip.Addr{other.addrs[0], other.addrs[0]}, maps.NodeTunnel, tunnelMTU)
		})
	})
	if err != nil {
		return err
	}
	if err := n.Netlink().LinkSetUp(device); err != nil {
		return err
	}
	return n.addRoutes(other, func(int) rtnl.NodeRoute {
		return rtnl.NodeRoute{Device: device.Attrs().Index, Tunnel: rtnl.Tunnel{ID: tunnelVNI, Local: n.addrs[0], Remote: other.addrs[0]}}
	})
}

// addTunnel adds a device that takes the outer addresses from routes and programs.
func (n node) addTunnel() (netlink.Link, error) {
	const addrGenModeNone = 1 // IN6_ADDR_GEN_MODE_NONE

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = tunnelDevice, tunnelMTU, n.mac(0)
	if err := n.Netlink().LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, FlowBased: true, Port: tunnelPort}); err != nil {
		return nil, fmt.Errorf("add a VXLAN device: %w", err)
	}
	device, err := n.Netlink().LinkByName(tunnelDevice)
	if err != nil {
		return nil, err
	}
	if err := n.Netlink().LinkSetARPOff(device); err != nil {
		return nil, err
	}
	return device, n.Netlink().LinkSetIP6AddrGenMode(device, addrGenModeNone)
}

func setNode(ctx context.Context, dp *loader.Datapath, n node, remotes [2]netip.Addr, mode maps.NodeMode, mtu int) error {
	var nodes []maps.Node
	for i, subnet := range n.subnets {
		nodes = append(nodes, maps.Node{Prefix: subnet, Remote: remotes[i], Mode: mode, MTU: mtu})
	}
	return maps.With(ctx, dp, func(store *maps.Store) error { return store.SetNodes(nodes) })
}

// addRoutes adds a route to the pods of another node in each family.
func (n node) addRoutes(to node, of func(family int) rtnl.NodeRoute) error {
	return n.Do(func() error {
		routes, err := rtnl.OpenNodeRoutes(rtnl.NodeProtocol)
		if err != nil {
			return err
		}
		defer routes.Close()
		for i, subnet := range to.subnets {
			route := of(i)
			route.Prefix = subnet
			if err := routes.Add(route); err != nil {
				return err
			}
		}
		return nil
	})
}
