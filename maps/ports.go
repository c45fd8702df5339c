package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Port is a port of the host that leads to a container.
type Port struct {
	HostAddr netip.Addr // 0.0.0.0 and :: are any address of their family
	HostPort uint16
	Protocol Protocol // TCP or UDP
	Addr     netip.Addr
	Port     uint16    // the container's
	Sources  PrefixSet // clients that it is for; 0: all
	Owner    loader.Owner
	Network  Network
}

// String is for people.
func (p Port) String() string {
	return fmt.Sprintf("%s %s leads to %s", p.Protocol, p.hostSide(), netip.AddrPortFrom(p.Addr, p.Port))
}

func (p Port) hostSide() netip.AddrPort {
	return netip.AddrPortFrom(p.HostAddr, p.HostPort)
}

// PortTakenError says that another attachment has a host port. It wraps ErrTaken.
type PortTakenError struct {
	Wanted Port
	Holder Port
}

func (e *PortTakenError) Error() string {
	return fmt.Sprintf("host port %s/%s is taken by the container at %s", e.Wanted.hostSide(), e.Wanted.Protocol, e.Holder.Addr)
}

// Unwrap returns ErrTaken.
func (e *PortTakenError) Unwrap() error { return ErrTaken }

// AddPort creates the entry of a host port. Where another attachment has it,
// the error is a *PortTakenError.
func (s *Store) AddPort(p Port) error {
	key := portKey(p)
	value := bpf.DatapathPort{
		Owner:   uint64(p.Owner),
		Addr:    wireAddr(p.Addr),
		Network: uint32(p.Network),
		Port:    p.Port,
		Sources: uint32(p.Sources),
	}
	err := create(s.dp.Ports, &key, &value)
	if err == nil {
		return s.addReverse(p)
	}
	if holder, found, _ := GetPort(s.dp, p); errors.Is(err, ErrTaken) && found {
		return &PortTakenError{Wanted: p, Holder: holder}
	}
	return fmt.Errorf("create host port %s/%s: %w", p.hostSide(), p.Protocol, err)
}

// addReverse creates the entry that leads from the container's port to the
// host's. Of several host ports for one port of a container the first has it.
func (s *Store) addReverse(p Port) error {
	key := bpf.DatapathPortKey{
		Addr:     wireAddr(p.Addr),
		Port:     p.Port,
		Protocol: uint8(p.Protocol),
		Side:     bpf.DatapathPortSidePORT_CONTAINER,
	}
	value := bpf.DatapathPort{
		Owner:   uint64(p.Owner),
		Addr:    wireAddr(p.HostAddr),
		Network: uint32(p.Network),
		Port:    p.HostPort,
	}
	if err := create(s.dp.Ports, &key, &value); err != nil && !errors.Is(err, ErrTaken) {
		return fmt.Errorf("create the way back of host port %s/%s: %w", p.hostSide(), p.Protocol, err)
	}
	return nil
}

// GetPort returns the entry with p's host address, port and protocol, and
// whether there is one.
func GetPort(dp *loader.Datapath, p Port) (Port, bool, error) {
	key := portKey(p)
	var value bpf.DatapathPort
	err := dp.Ports.Lookup(&key, &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Port{}, false, nil
	}
	if err != nil {
		return Port{}, false, fmt.Errorf("look up host port %s/%s: %w", p.hostSide(), p.Protocol, err)
	}
	return portOf(key, value), true, nil
}

// Ports lists all host ports, in no order.
func Ports(dp *loader.Datapath) ([]Port, error) {
	var list []Port
	for entry, err := range entries[bpf.DatapathPortKey, bpf.DatapathPort](dp.Ports) {
		if err != nil {
			return nil, err
		}
		if entry.key.Side == bpf.DatapathPortSidePORT_HOST {
			list = append(list, portOf(entry.key, entry.value))
		}
	}
	return list, nil
}

func portKey(p Port) bpf.DatapathPortKey {
	return bpf.DatapathPortKey{
		Addr:     wireAddr(p.HostAddr),
		Port:     p.HostPort,
		Protocol: uint8(p.Protocol),
	}
}

func portOf(key bpf.DatapathPortKey, value bpf.DatapathPort) Port {
	return Port{
		HostAddr: addrOf(key.Addr),
		HostPort: key.Port,
		Protocol: Protocol(key.Protocol),
		Addr:     addrOf(value.Addr),
		Port:     value.Port,
		Sources:  PrefixSet(value.Sources),
		Owner:    loader.Owner(value.Owner),
		Network:  Network(value.Network),
	}
}
