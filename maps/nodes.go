package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// NodeMode is how the host's route reaches the containers of a node.
type NodeMode bpf.NodeMode

// The modes of nodes.
const (
	// By the cluster's tunnel, as the node reaches this host's: what else comes in their name is dropped.
	NodeTunnel = NodeMode(bpf.NodeTunnel)
	// As any other network. So is a node whose packets should not bypass the stack to the tunnel.
	NodeDirect = NodeMode(bpf.NodeDirect)
	// By the tunnel, while the node may choose direct routes, as each does for itself.
	NodeEither = NodeMode(bpf.NodeEither)
)

// String returns "tunnel", "direct" or "either".
func (m NodeMode) String() string {
	switch m {
	case NodeTunnel:
		return "tunnel"
	case NodeDirect:
		return "direct"
	case NodeEither:
		return "either"
	default:
		return fmt.Sprintf("mode %d", uint8(m))
	}
}

// Node is a prefix of containers of another node.
type Node struct {
	Prefix netip.Prefix
	Remote netip.Addr // the node's own address
	Mode   NodeMode
	MTU    int // of the path to the containers: the longest IP packet
}

// String describes the node for an operator.
func (n Node) String() string {
	return fmt.Sprintf("%s at %s, mode %s, MTU %d", n.Prefix, n.Remote, n.Mode, n.MTU)
}

// Answerer returns who answers on the way of containers' packets: the gateway of the prefix, which the node's tunnel
// has, or the node itself.
func (n Node) Answerer() netip.Addr {
	if n.Mode == NodeDirect {
		return n.Remote
	}
	return n.Prefix.Addr().Next()
}

// OuterMTU returns the size of the longest packets between the nodes: VXLAN adds its headers.
func (n Node) OuterMTU() int {
	const headers4, headers6 = 50, 70

	switch {
	case n.Mode == NodeDirect:
		return n.MTU
	case n.Remote.Is4():
		return n.MTU + headers4
	default:
		return n.MTU + headers6
	}
}

// check names what makes the node impossible.
func (n Node) check() error {
	const minMTU4, minMTU6, maxMTU = 68, 1280, 65535 // RFC 791, RFC 8200

	least := minMTU6
	if n.Prefix.Addr().Is4() {
		least = minMTU4
	}
	switch {
	case !isContainers(n.Prefix):
		return fmt.Errorf("prefix %s of a node: want a network such as 10.244.1.0/24", n.Prefix)
	case !isNodeAddr(n.Remote):
		return fmt.Errorf("address %s of the node that has %s: want one that packets can be sent to", n.Remote, n.Prefix)
	case n.Mode != NodeTunnel && n.Mode != NodeDirect && n.Mode != NodeEither:
		return fmt.Errorf("%s of the node that has %s: want %s, %s or %s", n.Mode, n.Prefix, NodeTunnel, NodeDirect, NodeEither)
	case n.MTU < least || n.MTU > maxMTU:
		return fmt.Errorf("MTU %d of the node that has %s: want %d to %d", n.MTU, n.Prefix, least, maxMTU)
	}
	return nil
}

// isContainers returns whether a node's containers can have the prefix.
func isContainers(p netip.Prefix) bool {
	return p.IsValid() && p == p.Masked() && p.Bits() != 0 && !p.Addr().Is4In6()
}

// isNodeAddr returns whether a node can have the address.
func isNodeAddr(addr netip.Addr) bool {
	return addr.IsValid() && !addr.IsUnspecified() && !addr.IsMulticast() && !addr.IsLoopback() && !addr.Is4In6() && addr.Zone() == ""
}

func (n Node) wire() bpf.Node {
	return bpf.Node{Remote: wireAddr(n.Remote), Mtu: uint32(n.MTU), Mode: bpf.NodeMode(n.Mode)}
}

// nodesSet is the set of nodes in the keys of their map, which has no other.
const nodesSet PrefixSet = 0

// Nodes lists the other nodes of the cluster.
func Nodes(dp *loader.Datapath) ([]Node, error) {
	keys, err := prefixKeys(dp.Nodes)
	if err != nil {
		return nil, err
	}
	var list []Node
	for _, key := range keys {
		var value bpf.Node
		if err := dp.Nodes.Lookup(&key, &value); err != nil {
			return nil, fmt.Errorf("look up in %v: %w", dp.Nodes, err)
		}
		list = append(list, Node{prefixOf(key), addrOf(value.Remote), NodeMode(value.Mode), int(value.Mtu)})
	}
	return list, nil
}

// SetNodes makes the list that of all other nodes. It writes what differs, and what is to stay is there at each
// moment. The caller removes the routes to a node before the node, and adds them after it: otherwise packets
// to it are masqueraded in between.
func (s *Store) SetNodes(nodes []Node) error {
	if s.dp.Nodes == nil && len(nodes) > 0 {
		return errNoCluster
	}
	wanted := map[netip.Prefix]Node{}
	for _, n := range nodes {
		if err := n.check(); err != nil {
			return err
		}
		if other, ok := wanted[n.Prefix]; ok {
			return fmt.Errorf("prefix %s: both %s and %s have it", n.Prefix, other.Remote, n.Remote)
		}
		wanted[n.Prefix] = n
	}
	present, err := Nodes(s.dp)
	if err != nil {
		return err
	}
	var gone []Node
	for _, n := range present {
		if w, ok := wanted[n.Prefix]; !ok {
			gone = append(gone, n)
		} else if w == n {
			delete(wanted, n.Prefix)
		}
	}
	if len(wanted)+len(gone) > 0 {
		s.changed = true
	}
	return errors.Join(s.putNodes(wanted), s.deleteNodes(gone), s.countNodes(len(nodes)))
}

func (s *Store) putNodes(nodes map[netip.Prefix]Node) error {
	if len(nodes) > 0 {
		// The programs look at the entries only when there are some.
		if err := s.countNodes(len(nodes)); err != nil {
			return err
		}
	}
	for _, n := range nodes {
		key, value := prefixKey(nodesSet, n.Prefix), n.wire()
		if err := s.dp.Nodes.Put(&key, &value); err != nil {
			return fmt.Errorf("put node %s: %w", n, explainFull(s.dp.Nodes, err))
		}
	}
	return nil
}

func (s *Store) deleteNodes(nodes []Node) error {
	var errs []error
	for _, n := range nodes {
		key := prefixKey(nodesSet, n.Prefix)
		if err := s.dp.Nodes.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete node %s: %w", n, err))
		}
	}
	return errors.Join(errs...)
}
