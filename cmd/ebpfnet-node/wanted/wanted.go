// Package wanted says what a node is to have so that its containers and those of all other nodes reach each
// other: a pure function of the nodes, this node's devices and the configuration.
//
// It has no memory, so all nodes that see the same Node objects agree on who has a prefix, and what one has
// after a restart is what it had before. It may import loader/rtnl.
package wanted

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// Node is what counts of a Node object. Its text comes from outside.
type Node struct {
	Name      string
	Created   time.Time // by the API server's clock: nobody chooses it
	PodCIDRs  []string
	Addresses []string // its internal addresses, best first
}

// Mode is how packets go to other nodes.
type Mode string

// The modes.
const (
	ModeTunnel Mode = "tunnel" // VXLAN
	ModeDirect Mode = "direct" // by the other node's address; the network must let addresses of containers pass
	ModeAuto   Mode = "auto"   // direct to nodes on the same link for which a probe has passed
)

// Config is what an operator chooses, the same on all nodes.
type Config struct {
	Mode       Mode
	Device     string // name of the tunnel device
	Port       int    // UDP port of VXLAN
	VNI        uint32
	MTU        int            // of the network between nodes; 0: that of this node's device
	PreferIPv6 bool           // between nodes that have addresses of both families
	PodCIDRs   []netip.Prefix // those of the cluster; empty: any
	Reserved   []netip.Addr   // no prefix of a node may have them: the API server's
}

// Host is what counts of this node's devices.
type Host struct {
	Links  []Link
	Proved map[netip.Addr]bool // addresses of nodes that have answered a direct probe
}

// Link is a device that is up and not a container's.
type Link struct {
	Index     int
	Name      string
	MTU       int // 0: it leads nowhere, as lo
	Addresses []netip.Prefix
}

// State is what a node is to have.
type State struct {
	Device   *Device // the tunnel; nil in ModeDirect
	Routes   []rtnl.NodeRoute
	Peers    []Peer
	Probes   []Probe        // in ModeAuto
	PodCIDRs []netip.Prefix // of this node
	PodMTU   int            // of its containers; 0: that of the route to the outside
	Skipped  []Skip
	Problems []string // why this node's own containers would not be reached
}

// NodeOf returns the name of the node that has a prefix, or what contains it.
func (s *State) NodeOf(prefix netip.Prefix) string {
	for _, peer := range s.Peers {
		if peer.Prefix.Contains(prefix.Addr()) {
			return peer.Node
		}
	}
	return ""
}

// Device is the tunnel device: VXLAN that takes the outer addresses from routes and programs.
type Device struct {
	Name      string
	VNI       uint32
	Port      int
	MAC       string // the driver drops packets from its own, so each node has another
	MTU       int
	Addresses []netip.Prefix // the gateway of each of this node's prefixes: what the host itself sends from

	Outer      [2]netip.Addr   // IPv4, IPv6: the tunnel's own sources; invalid: the kernel chooses
	Containers [2]netip.Prefix // IPv4, IPv6: who gets what the tunnel receives; an unspecified address: nobody; invalid: everybody
}

// Peer is an entry of the datapath's map of nodes: containers of another node.
type Peer struct {
	Node   string
	Prefix netip.Prefix
	Remote netip.Addr
	Direct bool
	Either bool // by tunnel, while the node may send directly: each finds out for itself
	MTU    int  // of the path: the longest packet of a container
}

// Probe asks a node on a link of this one whether the network lets addresses of containers pass. Routes lead its
// packets as direct ones would lead those of containers.
type Probe struct {
	Own, Peer netip.Addr // the first of podCIDRs, which no container has
	Remote    netip.Addr // the node's
}

// Skip is a prefix of a node, or a node without any, that is not served as it should be.
type Skip struct {
	Node   string
	Prefix string // as the Node object has it; empty: the node
	Reason string
}

// ErrUnknown is wrapped by the error for a node of which too little is known. What it has should stay.
var ErrUnknown = errors.New("nothing is changed")

// ofTunnelDevice stands in a route for the index of the tunnel device, which may not exist yet.
const ofTunnelDevice = 0

// Overhead of VXLAN: outer IP, UDP and VXLAN headers, and the inner Ethernet header.
const (
	overhead4 = 20 + 8 + 8 + 14
	overhead6 = 40 + 8 + 8 + 14

	leastMTU4, leastMTU6 = 68, 1280 // RFC 791, RFC 8200
	metricIPv6           = 1024     // what the kernel makes of 0
)

// Of returns what the node with the name own is to have.
func Of(nodes []Node, own string, config Config, host Host) (*State, error) {
	c, err := newCluster(nodes, own, config, host)
	if err != nil {
		return nil, err
	}
	c.resolve()
	s := &State{PodCIDRs: c.prefixesOf(c.own), Problems: c.problems}
	path := newPath(c.own, config, host)
	missing := ""
	if len(s.PodCIDRs) == 0 {
		missing = "podCIDR"
	} else if len(path.families()) == 0 {
		missing = "usable internal address"
	} else if path.mtu == 0 {
		missing = "device that is up and has an address"
	}
	if missing != "" {
		reasons := strings.Join(append(c.problems, c.own.leftOut...), "; ")
		return nil, fmt.Errorf("node %s has no %s (%s): %w", own, missing, reasons, ErrUnknown)
	}
	s.Problems = append(s.Problems, path.problems(s.PodCIDRs)...)
	if config.Mode != ModeDirect {
		s.Device = path.device(own, s.PodCIDRs)
		s.PodMTU = path.tunnelMTU(path.families()[0])
	}
	for _, claim := range c.accepted {
		if claim.node != c.own {
			s.add(claim, path)
			s.addProbe(claim, path)
		}
	}
	s.Skipped = append(s.Skipped, c.skipped...)
	return s, nil
}

// add adds what leads to a prefix of another node.
func (s *State) add(claim claim, path *path) {
	way, reason := path.to(claim, s.Device)
	if reason != "" {
		s.Skipped = append(s.Skipped, Skip{claim.node.name, claim.prefix.String(), reason})
	}
	if !way.remote.IsValid() {
		return
	}
	if way.route.Prefix.IsValid() {
		s.Routes = append(s.Routes, way.route)
	}
	s.Peers = append(s.Peers, Peer{
		Node: claim.node.name, Prefix: claim.prefix, Remote: way.remote, Direct: way.direct, Either: path.mayChange(claim, way), MTU: way.mtu,
	})
}

// addProbe adds a probe of a node on the same link.
func (s *State) addProbe(claim claim, path *path) {
	if path.config.Mode != ModeAuto {
		return
	}
	remote := claim.node.addresses[familyOf(claim.prefix.Addr())]
	link, found := path.linkTo(remote)
	own := probeAddresses(s.PodCIDRs)[familyOf(claim.prefix.Addr())]
	isKnown := slices.ContainsFunc(s.Probes, func(p Probe) bool { return p.Remote == remote })
	if !found || !own.IsValid() || isKnown {
		return
	}
	peer := claim.prefix.Addr()
	s.Probes = append(s.Probes, Probe{own, peer, remote})
	s.Routes = append(s.Routes, rtnl.NodeRoute{
		Prefix: netip.PrefixFrom(peer, peer.BitLen()), Metric: metricOf(claim.prefix), Device: link.Index, Gateway: remote, Source: own,
	})
}

// probeAddresses returns the first address of the first prefix of each family.
func probeAddresses(podCIDRs []netip.Prefix) (first [2]netip.Addr) {
	for _, prefix := range podCIDRs {
		if own := &first[familyOf(prefix.Addr())]; !own.IsValid() {
			*own = prefix.Addr()
		}
	}
	return first
}

// way leads to a prefix of another node. Without a route the host's own routes lead there.
type way struct {
	route  rtnl.NodeRoute
	remote netip.Addr
	direct bool
	mtu    int
}

// path is the way between this node and others.
type path struct {
	config Config
	host   Host
	own    [2]netip.Addr // this node's address of each family: IPv4, IPv6
	local  [2]bool       // whether a device of this host has it
	mtu    int
}

func newPath(own *member, config Config, host Host) *path {
	p := &path{config: config, host: host, own: own.addresses, mtu: config.MTU}
	least := 0 // of devices with this node's address
	for _, link := range host.Links {
		for _, address := range link.Addresses {
			for family, addr := range p.own {
				if address.Addr() == addr {
					p.local[family] = true
					least = smaller(least, link.MTU)
				}
			}
		}
	}
	if least == 0 { // the address is on lo, or translated by a cloud
		for _, link := range host.Links {
			least = smaller(least, link.MTU)
		}
	}
	if p.mtu == 0 {
		p.mtu = least
	}
	return p
}

// smaller returns the smaller one of two MTUs, of which 0 is none.
func smaller(a, b int) int {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// families returns the indexes of the families that this node has an address of, best first. Nodes with
// the same configuration choose the same one for both directions.
func (p *path) families() []int {
	order := []int{0, 1}
	if p.config.PreferIPv6 {
		order = []int{1, 0}
	}
	return slices.DeleteFunc(order, func(i int) bool { return !p.own[i].IsValid() })
}

// tunnelMTU returns the MTU inside of a tunnel over a family.
func (p *path) tunnelMTU(family int) int { return p.mtu - []int{overhead4, overhead6}[family] }

// device returns the tunnel device. Its MTU is the largest of any route; others have their own.
func (p *path) device(node string, podCIDRs []netip.Prefix) *Device {
	d := &Device{Name: p.config.Device, VNI: p.config.VNI, Port: p.config.Port, MAC: macOf(node)}
	for _, family := range p.families() {
		d.MTU = max(d.MTU, p.tunnelMTU(family))
	}
	for family, local := range p.local {
		if local {
			d.Outer[family] = p.own[family]
		}
	}
	d.Containers = nobody
	for _, prefix := range podCIDRs {
		d.admit(prefix)
		gateway := gatewayOf(prefix)
		d.Addresses = append(d.Addresses, netip.PrefixFrom(gateway, gateway.BitLen()))
	}
	if p.config.Mode == ModeAuto {
		for _, own := range probeAddresses(podCIDRs) {
			if own.IsValid() {
				d.Addresses = append(d.Addresses, netip.PrefixFrom(own, own.BitLen()))
			}
		}
	}
	return d
}

// nobody has these addresses of both families: the datapath would take no prefix for any.
var nobody = [2]netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 32), netip.PrefixFrom(netip.IPv6Unspecified(), 128)}

// admit lets containers of a prefix receive. With two prefixes of a family, the datapath tells none apart.
func (d *Device) admit(prefix netip.Prefix) {
	family := familyOf(prefix.Addr())
	isFirst := !slices.ContainsFunc(d.Addresses, func(known netip.Prefix) bool { return familyOf(known.Addr()) == family })
	d.Containers[family] = netip.Prefix{}
	if isFirst {
		d.Containers[family] = prefix
	}
}

// problems returns what of this node hinders its own containers. Of its addresses the preferred one counts, which almost
// all nodes use: if some node that has no such address could make the other one count, too, it could stop this one.
func (p *path) problems(podCIDRs []netip.Prefix) (problems []string) {
	if p.config.Mode == ModeDirect {
		return nil
	}
	if reason := p.isAway(p.families()[0]); reason != "" {
		problems = append(problems, reason)
	}
	isIPv6 := func(prefix netip.Prefix) bool { return prefix.Addr().Is6() }
	if mtu := p.tunnelMTU(p.families()[0]); slices.ContainsFunc(podCIDRs, isIPv6) && mtu < leastMTU6 {
		problems = append(problems, fmt.Sprintf(
			"an MTU of %d between nodes leaves containers %d; IPv6 needs %d", p.mtu, mtu, leastMTU6))
	}
	return problems
}

// isAway returns what is wrong if this node's address of a family is on no device.
func (p *path) isAway(family int) string {
	if p.local[family] {
		return ""
	}
	return fmt.Sprintf("no device that is up has this node's address %s: other nodes may drop what it sends", p.own[family])
}

// to returns the way to a prefix, and what is wrong with it.
func (p *path) to(claim claim, device *Device) (way, string) {
	if p.config.Mode != ModeTunnel {
		way, reason := p.direct(claim)
		if reason == "" || p.config.Mode == ModeDirect {
			return way, reason
		}
	}
	return p.tunnel(claim, device)
}

// direct returns the way by a node's address.
func (p *path) direct(claim claim) (way, string) {
	remote := claim.node.addresses[familyOf(claim.prefix.Addr())]
	switch {
	case !remote.IsValid():
		return way{}, "the node has no usable internal address of the prefix's family"
	case p.config.Mode == ModeAuto && !p.host.Proved[remote]:
		return way{}, "no direct probe has passed"
	}
	if link, found := p.linkTo(remote); found {
		route := rtnl.NodeRoute{Prefix: claim.prefix, Metric: metricOf(claim.prefix), Device: link.Index, Gateway: remote}
		return way{route, remote, true, link.MTU}, ""
	}
	// Its containers are in the map all the same, so that nothing towards them is masqueraded.
	return way{remote: remote, direct: true, mtu: p.mtu},
		fmt.Sprintf("its address %s is on no link of this node: the way to its containers is left to the host's routes", remote)
}

// mayChange returns whether a node to which the tunnel leads may send directly.
func (p *path) mayChange(claim claim, way way) bool {
	_, found := p.linkTo(claim.node.addresses[familyOf(claim.prefix.Addr())])
	return p.config.Mode == ModeAuto && found && !way.direct
}

// linkTo returns the link that an address of another node is on.
func (p *path) linkTo(remote netip.Addr) (link Link, found bool) {
	for _, link := range p.host.Links {
		for _, address := range link.Addresses {
			if address.Masked().Contains(remote) {
				return link, true
			}
		}
	}
	return Link{}, false
}

// tunnel returns the way through the tunnel device.
func (p *path) tunnel(claim claim, device *Device) (way, string) {
	for _, family := range p.families() {
		remote := claim.node.addresses[family]
		if !remote.IsValid() {
			continue
		}
		mtu, least := p.tunnelMTU(family), []int{leastMTU4, leastMTU6}[familyOf(claim.prefix.Addr())]
		source := device.gateway(familyOf(claim.prefix.Addr()))
		if !source.IsValid() { // the host may have disabled the family, and the node would drop what has another source
			return way{}, "this node has no podCIDR of the prefix's family"
		}
		if mtu < least {
			return way{}, fmt.Sprintf("the tunnel's MTU is %d, less than %d", mtu, least)
		}
		tunnel := rtnl.Tunnel{ID: p.config.VNI, Remote: remote, Checksum: remote.Is6()} // no receiver takes IPv6 without
		if p.local[family] {
			tunnel.Local = p.own[family]
		}
		route := rtnl.NodeRoute{
			Prefix: claim.prefix, Metric: metricOf(claim.prefix), Device: ofTunnelDevice,
			Source: source, Tunnel: tunnel,
		}
		if mtu != device.MTU {
			route.MTU = mtu
		}
		reason := ""
		if family != p.families()[0] { // else it is this node's problem
			reason = p.isAway(family)
		}
		return way{route, remote, false, mtu}, reason
	}
	return way{}, "the node has no usable internal address of a family that this node has, too"
}

// gateway returns the device's address of a family, or an invalid one.
func (d *Device) gateway(family int) netip.Addr {
	for _, address := range d.Addresses {
		if familyOf(address.Addr()) == family {
			return address.Addr()
		}
	}
	return netip.Addr{}
}

// gatewayOf returns the first address of a prefix, as host-local has it.
func gatewayOf(prefix netip.Prefix) netip.Addr { return prefix.Addr().Next() }

// macOf derives a locally administered unicast address from a node's name, so that a device that is made again
// has it again. No other node needs to know it.
func macOf(node string) string {
	sum := sha256.Sum256([]byte("ebpfnet-node " + node))
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^1 | 2
	return mac.String()
}

func metricOf(prefix netip.Prefix) int {
	if prefix.Addr().Is6() {
		return metricIPv6
	}
	return 0
}

// familyOf returns the index of a family: 0 for IPv4, 1 for IPv6.
func familyOf(addr netip.Addr) int {
	if addr.Is4() {
		return 0
	}
	return 1
}
