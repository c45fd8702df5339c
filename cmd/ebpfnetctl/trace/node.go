package trace

import (
	"net/netip"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// node returns the node of the cluster whose containers have an address.
func (w *walker) node(addr netip.Addr) (node maps.Node, ok bool) {
	for _, n := range w.nodes {
		if n.Prefix.Contains(addr) && (!ok || n.Prefix.Bits() > node.Prefix.Bits()) {
			node, ok = n, true
		}
	}
	return node, ok
}

// received returns what the tunnel says about a packet from another node.
func (w *walker) received(p packet) loader.Tunnel {
	node, _ := w.node(p.src.Addr())
	return loader.Tunnel{Remote: node.Remote, VNI: w.tunnel.VNI}
}

// tellNode tells that a packet comes from another node's container, or goes to one.
func (w *walker) tellNode(direction string, addr netip.Addr, device int) {
	node, ok := w.node(addr)
	switch {
	case ok && device == w.tunnel.IfIndex:
		w.tell("node", node.String(), "%s node %s by the tunnel, VNI %d, UDP port %d", direction, node.Remote, w.tunnel.VNI, w.tunnel.Port)
	case ok:
		w.tell("node", node.String(), "%s node %s without the tunnel", direction, node.Remote)
	case device == w.tunnel.IfIndex:
		w.tell("node", "", "no node has %s", addr)
	}
}
