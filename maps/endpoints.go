package maps

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Endpoint is a container address on this host.
type Endpoint struct {
	Addr      netip.Addr
	Owner     loader.Owner
	Network   Network
	Container Container
	IfIndex   int              // of the host's end of the veth
	MAC       net.HardwareAddr // of the container's end, 6 bytes
	HostMAC   net.HardwareAddr // of the host's end, 6 bytes
	Gateway   netip.Addr       // the host's address on the veth: the source of hairpin clients
	Masq      bool             // masquerade packets to the outside
	Tunnels   bool             // with Masq: masquerade tunnels, too
	NonMasq   PrefixSet        // destinations that are not masqueraded; 0: none
	Routes    PrefixSet        // routes with gateways, as its device has; 0: none
	FastPath  FastPath
	MTU       int // of the veth, bytes; larger packets take the slow path
}

// FastPath says which connections may bypass the host's stack. Between two endpoints
// the more restrictive value applies.
type FastPath string

// The values, as in the configuration.
const (
	FastPathAuto        FastPath = "auto"        // as always while the host's stack has no hooks, else as established
	FastPathEstablished FastPath = "established" // those whose handshake the stack has forwarded
	FastPathAlways      FastPath = "always"      // all of them
	FastPathNever       FastPath = "never"       // none
)

var fastPaths = map[FastPath]bpf.FastPath{
	FastPathAuto:        bpf.FastPathAuto,
	FastPathEstablished: bpf.FastPathEstablished,
	FastPathAlways:      bpf.FastPathAlways,
	FastPathNever:       bpf.FastPathNever,
}

func fastPathOf(value bpf.FastPath) FastPath {
	for path, known := range fastPaths {
		if known == value {
			return path
		}
	}
	return FastPath(fmt.Sprintf("fast path %d", value))
}

// String describes the endpoint for an operator.
func (e Endpoint) String() string {
	masq := ""
	if e.Masq {
		masq = ", masqueraded"
	}
	return fmt.Sprintf("%s is a container on device %d%s", e.Addr, e.IfIndex, masq)
}

// AddEndpoint creates the entry of e.Addr. If another attachment has it, the error is a *TakenError.
func (s *Store) AddEndpoint(e Endpoint) error {
	key := wireAddr(e.Addr)
	value := bpf.Endpoint{
		Owner:     uint64(e.Owner),
		Network:   uint32(e.Network),
		Container: uint64(e.Container),
		Ifindex:   uint32(e.IfIndex),
		Mac:       [6]byte(e.MAC),
		HostMac:   [6]byte(e.HostMAC),
		Gateway:   wireAddr(e.Gateway),
	}
	value.NonmasqSet = uint32(e.NonMasq)
	value.RouteSet = uint32(e.Routes)
	value.Mtu = uint16(e.MTU)
	value.FastPath = fastPaths[e.FastPath]
	if e.Masq {
		value.Flags |= bpf.EndpointMasq
	}
	if e.Tunnels {
		value.Flags |= bpf.EndpointMasqTunnels
	}
	s.changed = true
	err := create(s.dp.Endpoints, &key, &value)
	if err == nil {
		return nil
	}
	if holder, found, _ := GetEndpoint(s.dp, e.Addr); errors.Is(err, ErrTaken) && found {
		return &TakenError{holder.Owner, false, fmt.Sprintf("address %s is taken by the container on device %d", e.Addr, holder.IfIndex)}
	}
	return fmt.Errorf("create endpoint %s: %w", e.Addr, err)
}

// GetEndpoint returns the endpoint of an address, and whether it exists.
func GetEndpoint(dp *loader.Datapath, addr netip.Addr) (Endpoint, bool, error) {
	key := wireAddr(addr)
	var value bpf.Endpoint
	err := dp.Endpoints.Lookup(&key, &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Endpoint{}, false, nil
	}
	if err != nil {
		return Endpoint{}, false, fmt.Errorf("look up endpoint %s: %w", addr, err)
	}
	return endpointOf(key, value), true, nil
}

// Endpoints lists all endpoints, in no particular order.
func Endpoints(dp *loader.Datapath) ([]Endpoint, error) {
	return collect(dp.Endpoints, endpointOf)
}

func endpointOf(key bpf.Addr, value bpf.Endpoint) Endpoint {
	return Endpoint{
		Addr:      addrOf(key),
		Owner:     loader.Owner(value.Owner),
		Network:   Network(value.Network),
		Container: Container(value.Container),
		IfIndex:   int(value.Ifindex),
		MAC:       value.Mac[:],
		HostMAC:   value.HostMac[:],
		Gateway:   addrOf(value.Gateway),
		FastPath:  fastPathOf(value.FastPath),
		MTU:       int(value.Mtu),
		NonMasq:   PrefixSet(value.NonmasqSet),
		Routes:    PrefixSet(value.RouteSet),
		Masq:      value.Flags&bpf.EndpointMasq != 0,
		Tunnels:   value.Flags&bpf.EndpointMasqTunnels != 0,
	}
}
