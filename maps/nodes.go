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
	// By the cluster's tunnel, in both directions. Packets from the node's containers on other devices are dropped.
	NodeTunnel = NodeMode(bpf.NodeTunnel)
	// Routed, without a tunnel. Also for a node whose packets should not bypass the stack to the tunnel.
	NodeDirect = NodeMode(bpf.NodeDirect)
	// By the tunnel; packets from the node may be direct, because each node chooses for itself.
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
	MTU    int // of the path to the containers: the maximum IP packet
}

// String describes the node for an operator.
func (n Node) String() string {
	return fmt.Sprintf("%s at %s, mode %s, MTU %d", n.Prefix, n.Remote, n.Mode, n.MTU)
}

// Answerer returns the address that replies to a probe on the path of containers' packets: the gateway of the prefix,
// which the node's tunnel has, or the node itself.
func (n Node) Answerer() netip.Addr {
	if n.Mode == NodeDirect {
		return n.Remote
	}
	return n.Prefix.Addr().Next()
}

// OuterMTU returns the maximum size of packets between the nodes, including VXLAN's headers.
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

// check returns an error that says why the node is invalid.
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

// isContainers reports whether a node's containers can have the prefix.
func isContainers(p netip.Prefix) bool {
	return p.IsValid() && p == p.Masked() && p.Bits() != 0 && !p.Addr().Is4In6()
}

// isNodeAddr reports whether a node can have the address.
func isNodeAddr(addr netip.Addr) bool {
	return addr.IsValid() && !addr.IsUnspecified() && !addr.IsMulticast() && !addr.IsLoopback() && !addr.Is4In6() && addr.Zone() == ""
}

func (n Node) wire() bpf.Node {
	return bpf.Node{Remote: wireAddr(n.Remote), Mtu: uint32(n.MTU), Mode: bpf.NodeMode(n.Mode)}
}

// nodesSet is the set in the keys of map nodes, which has only one.
const nodesSet PrefixSet = 0

// Nodes lists the other nodes of the cluster.
func Nodes(dp *loader.Datapath) ([]Node, error) {
	return collect(dp.Nodes, func(key bpf.PrefixKey, value bpf.Node) Node {
		return Node{prefixOf(key), addrOf(value.Remote), NodeMode(value.Mode), int(value.Mtu)}
	})
}

// SetNodes replaces the list of other nodes. It writes only differences, so unchanged entries are present all the
// time. The caller removes the routes to a node before the node, and adds them after it: otherwise packets
// to it are masqueraded in between.
func (s *Store) SetNodes(nodes []Node) error {
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
		// The programs read the entries only if their number is not 0.
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
