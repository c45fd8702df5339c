package maps

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Tunnel is the device that reaches other nodes: VXLAN that takes the remote from each packet (collect metadata),
// without learning. It is an uplink like others: call AttachUplink and SetUplink before it is up. Zero: none.
type Tunnel struct {
	IfIndex int
	VNI     uint32
	Port    uint16
	// Addr4 and Addr6 are the addresses by which other nodes know the host: the sources of the tunnel's own packets.
	// Other nodes drop packets from other sources, so the host's routes must have the same (encap … src). Invalid: the
	// source of the route to the node, as without src. Kernels before 6.0 support only that: there, a node to which the
	// route has another source must be NodeDirect.
	Addr4, Addr6 netip.Addr
	// Containers4 and Containers6 are the prefixes of the host's own containers, the only destinations of packets from
	// the tunnel. Invalid: any destination; 0.0.0.0/32 and ::/128: none.
	Containers4, Containers6 netip.Prefix
}

// check returns an error that says why the tunnel is invalid.
func (t Tunnel) check() error {
	const maxVNI = 1<<24 - 1

	if t.IfIndex <= 0 || t.VNI > maxVNI || t.Port == 0 {
		return fmt.Errorf("tunnel by device %d, VNI %d, port %d: want a device, a VNI up to %d and a port", t.IfIndex, t.VNI, t.Port, maxVNI)
	}
	isAddr := func(addr netip.Addr, is4 bool) bool {
		return addr == netip.Addr{} || isNodeAddr(addr) && addr.Is4() == is4
	}
	isPrefix := func(p netip.Prefix, is4 bool) bool {
		return p == netip.Prefix{} || isContainers(p) && p.Addr().Is4() == is4
	}
	switch {
	case !isAddr(t.Addr4, true) || !isAddr(t.Addr6, false):
		return fmt.Errorf("tunnel with the sources %s and %s: want one of IPv4 and one of IPv6 that packets can be sent to", t.Addr4, t.Addr6)
	case !isPrefix(t.Containers4, true) || !isPrefix(t.Containers6, false):
		return fmt.Errorf("tunnel for the containers %s and %s: want a network of IPv4 such as 10.244.1.0/24, and one of IPv6", t.Containers4, t.Containers6)
	}
	return nil
}

// GetTunnel returns the tunnel in the map.
func GetTunnel(dp *loader.Datapath) (Tunnel, error) {
	value, err := readCluster(dp)
	return Tunnel{
		IfIndex: int(value.Tunnel), VNI: value.Vni, Port: value.Port,
		Addr4: addrOrNone(value.Addr4), Addr6: addrOrNone(value.Addr6),
		Containers4: maskedPrefix(value.Containers4), Containers6: maskedPrefix(value.Containers6),
	}, err
}

// SetTunnel writes the tunnel to the map. Packets that the device receives earlier are not checked.
func (s *Store) SetTunnel(t Tunnel) error {
	if t != (Tunnel{}) {
		if err := t.check(); err != nil {
			return err
		}
	}
	return s.changeCluster(func(c *bpf.Cluster) {
		*c = bpf.Cluster{
			Nodes: c.Nodes, Tunnel: uint32(t.IfIndex), Vni: t.VNI, Port: t.Port,
			Addr4: wireOrZero(t.Addr4), Addr6: wireOrZero(t.Addr6),
			Containers4: wireMasked(t.Containers4), Containers6: wireMasked(t.Containers6),
		}
	})
}

// wireMasked returns a prefix as address and mask; an invalid one as zeros.
func wireMasked(p netip.Prefix) (masked bpf.Prefix) {
	if !p.IsValid() {
		return masked
	}
	masked.Addr = wireAddr(p.Addr())
	copy(masked.Mask.Bytes[:], net.CIDRMask(mapped(p).Bits(), 8*net.IPv6len))
	return masked
}

func maskedPrefix(masked bpf.Prefix) netip.Prefix {
	ones, bits := net.IPMask(masked.Mask.Bytes[:]).Size()
	if ones == 0 {
		return netip.Prefix{}
	}
	addr := addrOf(masked.Addr)
	return netip.PrefixFrom(addr, ones-bits+addr.BitLen())
}

// countNodes writes the number of entries of nodes.
func (s *Store) countNodes(n int) error {
	return s.changeCluster(func(c *bpf.Cluster) { c.Nodes = uint32(n) })
}

func (s *Store) changeCluster(change func(*bpf.Cluster)) error {
	value, err := readCluster(s.dp)
	if err != nil {
		return err
	}
	before := value
	if change(&value); value == before {
		return nil
	}
	s.changed = true
	if err := s.dp.Cluster.Put(uint32(0), &value); err != nil {
		return fmt.Errorf("put the cluster: %w", err)
	}
	return nil
}

func readCluster(dp *loader.Datapath) (value bpf.Cluster, err error) {
	if err := dp.OpenOnDemand(bpf.MapCluster); err != nil || dp.Cluster == nil {
		return value, err
	}
	if err := dp.Cluster.Lookup(uint32(0), &value); err != nil {
		return value, fmt.Errorf("look up the cluster: %w", err)
	}
	return value, nil
}
