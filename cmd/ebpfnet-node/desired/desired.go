// Package desired computes the state of this host in which its containers and those of all other nodes reach each other.
// It is a pure function of the nodes, this node's devices and the configuration.
//
// It has no memory, so all nodes that see the same Node objects agree on who has a prefix, and a restart changes
// nothing.
package desired

import (
	"cmp"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// Node has the relevant fields of a Node object. Others may have written them.
type Node struct {
	Name      string
	Created   time.Time // by the API server's clock: no client can choose it
	PodCIDRs  []string
	Addresses []string // its internal addresses, best first
}

// Mode is how packets reach other nodes.
type Mode string

// The modes.
const (
	ModeTunnel Mode = "tunnel" // VXLAN
	ModeDirect Mode = "direct" // the other node is the gateway; the network must pass containers' addresses
	ModeAuto   Mode = "auto"   // direct to nodes on the same link that answer a probe, else a tunnel
)

// Config is the operator's configuration. It is the same on all nodes.
type Config struct {
	Mode       Mode
	Device     string // name of the tunnel device
	Port       int    // UDP port of VXLAN
	VNI        uint32
	MTU        int            // of the network between nodes; 0: the MTU of this node's device
	PreferIPv6 bool           // between nodes that have addresses of both families
	PodCIDRs   []netip.Prefix // contain those of all nodes; empty: no limit
	Reserved   []netip.Addr   // addresses that no node's prefix may contain: the API server's
}

// Host has the relevant facts about this node.
type Host struct {
	Links  []Link
	Proved map[netip.Addr]bool      // addresses of nodes that answer direct probes
	Lost   map[netip.Addr]time.Time // since when nodes do not answer them any more
}

// Link is a device that is up and not a container's.
type Link struct {
	Index     int
	MTU       int // 0: it leads to no other host, as lo
	Addresses []netip.Prefix
}

// State is the desired state of this host.
type State struct {
	Device     *Device                 // the tunnel; nil in ModeDirect
	Routes     []rtnl.NodeRoute        // to other nodes
	Unassigned []netip.Prefix          // unreachable, except by other routes
	Nodes      []maps.Node             // the prefixes of other nodes
	Names      map[netip.Prefix]string // of the nodes that have them
	Probes     []Probe                 // in ModeAuto
	PodCIDRs   []netip.Prefix          // of this node
	PodMTU     int                     // of its containers; 0: the MTU of the route to the outside
	Skipped    []nodestate.Skipped
	Problems   []string // why other nodes do not reach this node's containers
}

// NodeOf returns the name of the node that has a prefix, or one that contains it.
func (s *State) NodeOf(prefix netip.Prefix) string {
	for _, node := range s.Nodes {
		if node.Prefix.Contains(prefix.Addr()) {
			return s.Names[node.Prefix]
		}
	}
	return ""
}

// Device is the tunnel device: VXLAN that takes the outer addresses from routes and programs.
type Device struct {
	Name      string
	MAC       string // differs between nodes, because the driver drops packets from its own address
	MTU       int
	Addresses []netip.Prefix // the gateway of each of this node's prefixes: the host sends from them
	Tunnel    maps.Tunnel    // IfIndex is 0: the device may not exist yet
}

// Probe tests whether the network passes containers' addresses to a node on a link of this one. Its packets have routes of
// their own, like direct routes.
type Probe struct {
	Own, Peer netip.Addr // the first of podCIDRs, which no container has
	Remote    netip.Addr // the node's
}

// ErrUnknown is wrapped by the error for a node of which too little is known. Its state should not change.
var ErrUnknown = errors.New("nothing is changed")

// ofTunnelDevice stands in a route for the index of the tunnel device, which may not exist yet.
const ofTunnelDevice = 0

// Overhead of VXLAN: outer IP, UDP and VXLAN headers, and the inner Ethernet header.
const (
	overhead4 = 20 + 8 + 8 + 14
	overhead6 = 40 + 8 + 8 + 14

	minMTU4, minMTU6 = 68, 1280 // RFC 791, RFC 8200
	metricIPv6       = 1024     // what the kernel makes of 0
)

// Of returns the desired state of the node with the name own.
func Of(nodes []Node, own string, config Config, host Host) (*State, error) {
	c, err := newCluster(nodes, own, config, host)
	if err != nil {
		return nil, err
	}
	c.resolve()
	s := &State{Names: map[netip.Prefix]string{}, PodCIDRs: c.prefixesOf(c.own), Problems: c.problems}
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
	for _, assignment := range c.accepted {
		if assignment.node != c.own {
			s.add(assignment, path)
			s.addProbe(assignment, path)
		}
	}
	s.Unassigned = unassigned(config, s.PodCIDRs)
	s.Skipped = append(s.Skipped, c.skipped...)
	return s, nil
}

// unassigned returns prefixes of which only containers' addresses are reachable. With a tunnel these are the cluster's: they
// also contain the prefixes of nodes that have left. In mode direct, other routers may know more nodes than this one.
func unassigned(config Config, podCIDRs []netip.Prefix) (prefixes []netip.Prefix) {
	all := config.PodCIDRs
	if config.Mode == ModeDirect || len(all) == 0 {
		all = podCIDRs
	}
	for _, prefix := range all {
		isOfFamily := func(own netip.Prefix) bool { return own.Addr().Is4() == prefix.Addr().Is4() }
		if slices.ContainsFunc(podCIDRs, isOfFamily) && !slices.ContainsFunc(config.Reserved, prefix.Contains) {
			prefixes = append(prefixes, prefix)
		}
	}
	return prefixes
}

// add adds the route and the entry of another node's prefix.
func (s *State) add(assignment assignment, path *path) {
	way, reason := path.to(assignment, s.Device)
	if reason != "" {
		s.Skipped = append(s.Skipped, nodestate.Skipped{Node: assignment.node.name, Prefix: assignment.prefix.String(), Reason: reason})
	}
	if !way.node.Remote.IsValid() {
		return
	}
	if way.route.Prefix.IsValid() {
		s.Routes = append(s.Routes, way.route)
	}
	s.Nodes = append(s.Nodes, way.node)
	s.Names[assignment.prefix] = assignment.node.name
}

// addProbe adds a probe of a node on the same link.
func (s *State) addProbe(assignment assignment, path *path) {
	if path.config.Mode != ModeAuto {
		return
	}
	remote := assignment.node.addresses[familyOf(assignment.prefix.Addr())]
	link, found := path.linkTo(remote)
	own := probeAddresses(s.PodCIDRs)[familyOf(assignment.prefix.Addr())]
	isKnown := slices.ContainsFunc(s.Probes, func(p Probe) bool { return p.Remote == remote })
	if !found || !own.IsValid() || isKnown {
		return
	}
	peer := assignment.prefix.Addr()
	s.Probes = append(s.Probes, Probe{own, peer, remote})
	s.Routes = append(s.Routes, rtnl.NodeRoute{
		Prefix: netip.PrefixFrom(peer, peer.BitLen()), Metric: metricOf(assignment.prefix), Device: link.Index, Gateway: remote, Source: own,
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

// way is how to reach a prefix of another node. Without a route, the host's own routes are used.
type way struct {
	route rtnl.NodeRoute
	node  maps.Node
}

// path has what all ways to other nodes depend on.
type path struct {
	config Config
	host   Host
	own    [2]netip.Addr // this node's address of each family: IPv4, IPv6
	local  [2]bool       // whether a device of this host has it
	mtu    int
}

func newPath(own *member, config Config, host Host) *path {
	p := &path{config: config, host: host, own: own.addresses, mtu: config.MTU}
	smallest := 0 // of devices with this node's address
	for _, link := range host.Links {
		for _, address := range link.Addresses {
			for family, addr := range p.own {
				if address.Addr() == addr {
					p.local[family] = true
					smallest = smaller(smallest, link.MTU)
				}
			}
		}
	}
	if smallest == 0 { // the address is on lo, or translated by a cloud
		for _, link := range host.Links {
			smallest = smaller(smallest, link.MTU)
		}
	}
	if p.mtu == 0 {
		p.mtu = smallest
	}
	return p
}

// smaller returns the smaller of two MTUs. 0 means no MTU.
func smaller(a, b int) int {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

// families returns the indexes of the families of this node's addresses, best first. Nodes with the same configuration
// choose the same family for both directions.
func (p *path) families() []int {
	order := []int{0, 1}
	if p.config.PreferIPv6 {
		order = []int{1, 0}
	}
	return slices.DeleteFunc(order, func(i int) bool { return !p.own[i].IsValid() })
}

// tunnelMTU returns the MTU inside a tunnel over a family.
func (p *path) tunnelMTU(family int) int { return p.mtu - []int{overhead4, overhead6}[family] }

// device returns the tunnel device. It has the largest MTU of its routes; routes with a smaller MTU have their own.
func (p *path) device(node string, podCIDRs []netip.Prefix) *Device {
	d := &Device{Name: p.config.Device, MAC: macOf(node), Tunnel: maps.Tunnel{
		VNI: p.config.VNI, Port: uint16(p.config.Port),
		Containers4: containersOf(podCIDRs, 0), Containers6: containersOf(podCIDRs, 1),
	}}
	for _, family := range p.families() {
		d.MTU = max(d.MTU, p.tunnelMTU(family))
	}
	if p.local[0] {
		d.Tunnel.Addr4 = p.own[0]
	}
	if p.local[1] {
		d.Tunnel.Addr6 = p.own[1]
	}
	for _, prefix := range podCIDRs {
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

// containersOf returns the prefix of a family whose containers may receive from the tunnel. With two prefixes of the
// family it is invalid, and everybody may; without one it is an unspecified address, and nobody may.
func containersOf(podCIDRs []netip.Prefix, family int) (containers netip.Prefix) {
	unspecified := []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}[family]
	containers = netip.PrefixFrom(unspecified, unspecified.BitLen())
	for _, prefix := range podCIDRs {
		if familyOf(prefix.Addr()) != family {
			continue
		}
		if !containers.Addr().IsUnspecified() {
			return netip.Prefix{}
		}
		containers = prefix
	}
	return containers
}

// problems returns why other nodes do not reach this node's containers. Only this node's preferred address matters, which
// almost all nodes use: otherwise a node without such an address could stop this node.
func (p *path) problems(podCIDRs []netip.Prefix) (problems []string) {
	if p.config.Mode == ModeDirect {
		return nil
	}
	if reason := p.missingAddress(p.families()[0]); reason != "" {
		problems = append(problems, reason)
	}
	isIPv6 := func(prefix netip.Prefix) bool { return prefix.Addr().Is6() }
	if mtu := p.tunnelMTU(p.families()[0]); slices.ContainsFunc(podCIDRs, isIPv6) && mtu < minMTU6 {
		problems = append(problems, fmt.Sprintf(
			"an MTU of %d between nodes leaves containers %d; IPv6 needs %d", p.mtu, mtu, minMTU6))
	}
	return problems
}

// missingAddress returns a reason if no device has this node's address of a family, or "".
func (p *path) missingAddress(family int) string {
	if p.local[family] {
		return ""
	}
	return fmt.Sprintf("no device that is up has this node's address %s: other nodes may drop what it sends", p.own[family])
}

// to returns the way to a prefix, and a reason if it does not work as it should.
func (p *path) to(assignment assignment, device *Device) (way, string) {
	if p.config.Mode != ModeTunnel {
		way, reason := p.direct(assignment)
		if reason == "" || p.config.Mode == ModeDirect {
			return way, reason
		}
	}
	way, reason := p.tunnel(assignment, device)
	return way, cmp.Or(reason, p.lost(assignment))
}

// lost returns a reason if a node had a direct way, or "".
func (p *path) lost(assignment assignment) string {
	since, isLost := p.host.Lost[assignment.node.addresses[familyOf(assignment.prefix.Addr())]]
	if !isLost {
		return ""
	}
	return fmt.Sprintf("direct probes are lost since %s UTC, so the tunnel has its packets; with rp_filter=1, some were dropped until both nodes had changed",
		since.UTC().Format(time.TimeOnly))
}

// direct returns the way with the node as the gateway.
func (p *path) direct(assignment assignment) (way, string) {
	remote := assignment.node.addresses[familyOf(assignment.prefix.Addr())]
	switch {
	case !remote.IsValid():
		return way{}, "the node has no usable internal address of the prefix's family"
	case p.config.Mode == ModeAuto && !p.host.Proved[remote]:
		return way{}, "no direct probe has passed"
	}
	if link, found := p.linkTo(remote); found {
		route := rtnl.NodeRoute{Prefix: assignment.prefix, Metric: metricOf(assignment.prefix), Device: link.Index, Gateway: remote}
		return way{route, maps.Node{Prefix: assignment.prefix, Remote: remote, Mode: maps.NodeDirect, MTU: link.MTU}}, ""
	}
	// The node has an entry without a route, so that packets to its containers are not masqueraded.
	return way{node: maps.Node{Prefix: assignment.prefix, Remote: remote, Mode: maps.NodeDirect, MTU: p.mtu}},
		fmt.Sprintf("its address %s is on no link of this node: packets to its containers follow the host's routes", remote)
}

// tunnelMode returns how the tunnel reaches a prefix: a node on a link of this one may itself send directly.
func (p *path) tunnelMode(assignment assignment) maps.NodeMode {
	_, found := p.linkTo(assignment.node.addresses[familyOf(assignment.prefix.Addr())])
	if p.config.Mode == ModeAuto && found {
		return maps.NodeEither
	}
	return maps.NodeTunnel
}

// linkTo returns the link that an address of another node is on.
func (p *path) linkTo(remote netip.Addr) (link Link, found bool) {
	for _, link := range p.host.Links {
		for _, address := range link.Addresses {
			if link.MTU != 0 && address.Masked().Contains(remote) {
				return link, true
			}
		}
	}
	return Link{}, false
}

// tunnel returns the way through the tunnel device.
func (p *path) tunnel(assignment assignment, device *Device) (way, string) {
	for _, family := range p.families() {
		remote := assignment.node.addresses[family]
		if !remote.IsValid() {
			continue
		}
		mtu, smallest := p.tunnelMTU(family), []int{minMTU4, minMTU6}[familyOf(assignment.prefix.Addr())]
		source := device.gateway(familyOf(assignment.prefix.Addr()))
		if !source.IsValid() { // the host may have disabled the family, and the node drops packets from another source
			return way{}, "this node has no podCIDR of the prefix's family"
		}
		if mtu < smallest {
			return way{}, fmt.Sprintf("the tunnel's MTU is %d, less than %d", mtu, smallest)
		}
		tunnel := rtnl.Tunnel{ID: p.config.VNI, Remote: remote, Checksum: remote.Is6()} // receivers drop IPv6 without one
		if p.local[family] {
			tunnel.Local = p.own[family]
		}
		route := rtnl.NodeRoute{
			Prefix: assignment.prefix, Metric: metricOf(assignment.prefix), Device: ofTunnelDevice,
			Source: source, Tunnel: tunnel,
		}
		if mtu != device.MTU {
			route.MTU = mtu
		}
		reason := ""
		if family != p.families()[0] { // else it is this node's problem
			reason = p.missingAddress(family)
		}
		return way{route, maps.Node{Prefix: assignment.prefix, Remote: remote, Mode: p.tunnelMode(assignment), MTU: mtu}}, reason
	}
	return way{}, "the node has no usable internal address of a family that this node has, too"
}

// gateway returns the device's first address of a family, or an invalid one.
func (d *Device) gateway(family int) netip.Addr {
	for _, address := range d.Addresses {
		if familyOf(address.Addr()) == family {
			return address.Addr()
		}
	}
	return netip.Addr{}
}

// gatewayOf returns the gateway of a prefix: its first address, as with host-local.
func gatewayOf(prefix netip.Prefix) netip.Addr { return prefix.Addr().Next() }

// macOf derives a locally administered unicast address from a node's name, so that the device always has the same. No other
// node needs to know it.
func macOf(node string) string {
	sum := sha256.Sum256([]byte("ebpfnet-node " + node))
	mac := net.HardwareAddr(sum[:6])
	mac[0] = mac[0]&^1 | 2
	return mac.String()
}

func metricOf(prefix netip.Prefix) uint32 {
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
