package desired

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// cluster decides which node has which prefix and address. A Node object assigns both, and may be wrong, or written by
// somebody who wants packets of another node. If two objects conflict, the older one wins: a node that joins cannot take
// anything, and all nodes come to the same result. This node always has its own prefixes.
type cluster struct {
	config      Config
	host        Host
	own         *member
	members     []*member    // by age
	assignments []assignment // valid ones, by age
	accepted    []assignment // by prefix; none overlap
	skipped     []nodestate.Skipped
	problems    []string
}

// member is a node. An older node has a smaller rank.
type member struct {
	name      string
	rank      int
	addresses [2]netip.Addr // IPv4, IPv6; invalid: no usable one
	leftOut   []string      // unusable addresses, with reasons
	podCIDRs  []netip.Prefix
}

// assignment is a prefix that a Node object assigns to its node.
type assignment struct {
	prefix netip.Prefix
	node   *member
}

func newCluster(nodes []Node, own string, config Config, host Host) (*cluster, error) {
	byAge := slices.Clone(nodes)
	slices.SortFunc(byAge, func(a, b Node) int {
		return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name, b.Name))
	})
	c := &cluster{config: config, host: host}
	for rank, node := range byAge {
		m := &member{name: node.Name, rank: rank}
		if node.Name == own {
			c.own = m
		}
		c.members = append(c.members, m)
	}
	if c.own == nil {
		return nil, fmt.Errorf("the API has no node %s: %w", own, ErrUnknown)
	}
	for rank, node := range byAge {
		c.readAddresses(c.members[rank], node.Addresses)
		c.readPrefixes(c.members[rank], node.PodCIDRs)
	}
	return c, nil
}

func (c *cluster) skip(m *member, prefix, reason string) {
	if m == c.own {
		c.problems = append(c.problems, strings.TrimPrefix(prefix+": "+reason, ": "))
		return
	}
	c.skipped = append(c.skipped, nodestate.Skipped{Node: m.name, Prefix: prefix, Reason: reason})
}

// readAddresses takes the first address of each family.
func (c *cluster) readAddresses(m *member, texts []string) {
	for _, text := range texts {
		addr, err := netip.ParseAddr(text)
		addr = addr.Unmap()
		reason := ""
		switch {
		case err != nil || !addr.IsGlobalUnicast() || addr.Zone() != "":
			reason = "no node can be reached by it"
		case slices.ContainsFunc(c.config.PodCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) }):
			reason = fmt.Sprintf("it is in the cluster's prefixes for containers %v", c.config.PodCIDRs)
		}
		if reason != "" {
			m.leftOut = append(m.leftOut, text+": "+reason)
			continue
		}
		if own := &m.addresses[familyOf(addr)]; !own.IsValid() {
			*own = addr
		}
	}
}

// readPrefixes keeps the valid prefixes.
func (c *cluster) readPrefixes(m *member, texts []string) {
	if len(texts) == 0 {
		c.skip(m, "", "it has no podCIDR (yet)")
	}
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix.Addr().Is4In6() {
			c.skip(m, text, "it is not a prefix like 10.244.1.0/24")
			continue
		}
		if prefix = prefix.Masked(); c.isRefused(m, prefix) {
			continue
		}
		m.podCIDRs = append(m.podCIDRs, prefix)
		c.assignments = append(c.assignments, assignment{prefix, m})
	}
}

// special are addresses that no container has. A node that had them could cut off hosts.
var special = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"),
	netip.MustParsePrefix("::/16"), // loopback, IPv4-mapped and others
	netip.MustParsePrefix("fe80::/10"),
	netip.MustParsePrefix("ff00::/8"),
}

func (c *cluster) isRefused(m *member, prefix netip.Prefix) bool {
	const (
		largest4, largest6 = 8, 16 // bits
		gatewayAndPod      = 2     // bits
	)
	bits, largest := prefix.Bits(), []int{largest4, largest6}[familyOf(prefix.Addr())]
	reason := ""
	switch {
	case bits < largest:
		reason = fmt.Sprintf("it is larger than a /%d", largest)
	case bits > prefix.Addr().BitLen()-gatewayAndPod:
		reason = "it is too small for a container"
	case slices.ContainsFunc(special, prefix.Overlaps):
		reason = "it has addresses that no container can have"
	case len(c.config.PodCIDRs) > 0 && !slices.ContainsFunc(c.config.PodCIDRs, func(all netip.Prefix) bool {
		return all.Bits() <= bits && all.Contains(prefix.Addr())
	}):
		reason = fmt.Sprintf("it is outside of the cluster's %v", c.config.PodCIDRs)
	case slices.ContainsFunc(c.config.Reserved, prefix.Contains):
		reason = "it has the address of the API server"
	case m != c.own && slices.ContainsFunc(c.host.Links, func(link Link) bool { return link.isIn(prefix) }):
		reason = "it has an address of this node's devices"
	}
	if reason != "" {
		c.skip(m, prefix.String(), reason)
	}
	return reason != ""
}

// isIn reports whether an address of a device is in a prefix.
func (l Link) isIn(prefix netip.Prefix) bool {
	return slices.ContainsFunc(l.Addresses, func(own netip.Prefix) bool { return prefix.Contains(own.Addr()) })
}

// resolve decides between conflicting assignments, and drops addresses that are in accepted prefixes.
func (c *cluster) resolve() {
	c.refuseAddressesOfOlder()
	slices.SortFunc(c.assignments, comparePrefixes)
	for start := 0; start < len(c.assignments); {
		end := start + 1 // of the assignments within the first one
		for end < len(c.assignments) && c.assignments[start].prefix.Overlaps(c.assignments[end].prefix) {
			end++
		}
		c.accepted = append(c.accepted, c.decide(c.assignments[start:end])...)
		start = end
	}
	slices.SortFunc(c.accepted, comparePrefixes)
	for _, m := range c.members {
		c.dropAddresses(m)
	}
}

// comparePrefixes sorts by address. A prefix comes before those that it contains.
func comparePrefixes(a, b assignment) int {
	return cmp.Or(a.prefix.Addr().Compare(b.prefix.Addr()), cmp.Compare(a.prefix.Bits(), b.prefix.Bits()))
}

// decide returns the overlapping assignments that do not overlap an older one.
func (c *cluster) decide(assignments []assignment) []assignment {
	if len(assignments) == 1 {
		return assignments
	}
	rank := func(m *member) int {
		if m == c.own {
			return -1 // before all others
		}
		return m.rank
	}
	byAge := slices.Clone(assignments)
	slices.SortStableFunc(byAge, func(a, b assignment) int { return cmp.Compare(rank(a.node), rank(b.node)) })
	var accepted []assignment
	for _, a := range byAge {
		i := slices.IndexFunc(accepted, func(older assignment) bool { return older.prefix.Overlaps(a.prefix) })
		if i < 0 {
			accepted = append(accepted, a)
			continue
		}
		c.lose(a, accepted[i])
	}
	return accepted
}

// lose reports an assignment that another one precedes.
func (c *cluster) lose(loser, winner assignment) {
	c.skip(loser.node, loser.prefix.String(), fmt.Sprintf("it overlaps %s of node %s", winner.prefix, c.nameOf(winner.node)))
	if winner.node == c.own && loser.node.rank < c.own.rank {
		c.problems = append(c.problems, fmt.Sprintf("node %s is older and has %s, which overlaps this node's %s: others send there",
			loser.node.name, loser.prefix, winner.prefix))
	}
}

func (c *cluster) nameOf(m *member) string {
	if m == c.own {
		return m.name + ", this one"
	}
	return m.name
}

// refuseAddressesOfOlder refuses prefixes that contain an address of an older node, of the same node, or of this node:
// otherwise packets for that node itself would go to the prefix's node.
func (c *cluster) refuseAddressesOfOlder() {
	type address struct {
		addr netip.Addr
		node *member
	}
	var addresses []address
	for _, m := range c.members {
		for _, addr := range m.addresses {
			if addr.IsValid() {
				addresses = append(addresses, address{addr, m})
			}
		}
	}
	slices.SortFunc(addresses, func(a, b address) int { return a.addr.Compare(b.addr) })
	c.assignments = slices.DeleteFunc(c.assignments, func(assignment assignment) bool {
		first, _ := slices.BinarySearchFunc(addresses, assignment.prefix.Addr(), func(a address, addr netip.Addr) int { return a.addr.Compare(addr) })
		for _, a := range addresses[first:] {
			if !assignment.prefix.Contains(a.addr) {
				break
			}
			if a.node == c.own || assignment.node != c.own && a.node.rank <= assignment.node.rank {
				c.skip(assignment.node, assignment.prefix.String(), fmt.Sprintf("it has the address %s of node %s", a.addr, c.nameOf(a.node)))
				return true
			}
		}
		return false
	})
}

// isBroadcast reports whether an address is the last one of a device's IPv4 network, which no host has.
func (l Link) isBroadcast(addr netip.Addr) bool {
	const hostBits = 2 // /31 has none (RFC 3021)
	return addr.Is4() && slices.ContainsFunc(l.Addresses, func(own netip.Prefix) bool {
		return own.Contains(addr) && own.Bits() <= addr.BitLen()-hostBits && !own.Contains(addr.Next())
	})
}

// dropAddresses drops addresses in accepted prefixes, and of other nodes also this node's own and broadcast addresses.
func (c *cluster) dropAddresses(m *member) {
	for i, addr := range m.addresses {
		if !addr.IsValid() {
			continue
		}
		next, _ := slices.BinarySearchFunc(c.accepted, addr, func(assignment assignment, addr netip.Addr) int {
			if assignment.prefix.Addr().Compare(addr) <= 0 {
				return -1
			}
			return 1
		})
		switch {
		case m != c.own && addr == c.own.addresses[i]:
			c.skip(m, "", fmt.Sprintf("its address %s is this node's", addr))
		case m != c.own && slices.ContainsFunc(c.host.Links, func(link Link) bool { return link.isBroadcast(addr) }):
			c.skip(m, "", fmt.Sprintf("its address %s is a broadcast address", addr))
		case next > 0 && c.accepted[next-1].prefix.Contains(addr):
			c.loseAddress(m, addr, c.accepted[next-1])
		default:
			continue
		}
		m.addresses[i] = netip.Addr{}
	}
}

// loseAddress reports an address that is in a prefix.
func (c *cluster) loseAddress(m *member, addr netip.Addr, holder assignment) {
	c.skip(m, "", fmt.Sprintf("its address %s is in %s of node %s", addr, holder.prefix, c.nameOf(holder.node)))
	if holder.node == c.own && m.rank < c.own.rank {
		c.problems = append(c.problems, fmt.Sprintf("node %s is older and has the address %s in this node's %s: others send nothing there",
			m.name, addr, holder.prefix))
	}
}

// prefixesOf returns a node's accepted prefixes in the order of its object, where the preferred family is first.
func (c *cluster) prefixesOf(m *member) (prefixes []netip.Prefix) {
	for _, prefix := range m.podCIDRs {
		if slices.Contains(c.accepted, assignment{prefix, m}) {
			prefixes = append(prefixes, prefix)
		}
	}
	return prefixes
}
