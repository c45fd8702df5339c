package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// HostPort is a port of the host that is forwarded to a container.
type HostPort struct {
	HostAddr      netip.Addr // 0.0.0.0 or ::, any address of that family
	HostPort      uint16
	Protocol      Protocol // TCP or UDP
	ContainerAddr netip.Addr
	ContainerPort uint16
	SrcRanges     PrefixSet // networks of the clients that may use it; 0: all clients
	Owner         loader.Owner
	Network       Network
}

// String describes the host port for an operator.
func (p HostPort) String() string {
	return fmt.Sprintf("%s %s forwards to %s", p.Protocol, p.hostSide(), netip.AddrPortFrom(p.ContainerAddr, p.ContainerPort))
}

func (p HostPort) hostSide() netip.AddrPort {
	return netip.AddrPortFrom(p.HostAddr, p.HostPort)
}

func (p HostPort) takenBy(holder HostPort) error {
	return &TakenError{holder.Owner, true, fmt.Sprintf("host port %s/%s is taken by the container at %s", p.hostSide(), p.Protocol, holder.ContainerAddr)}
}

// AddHostPort creates the entries of a host port. If another attachment has it on an overlapping address
// (the same, or either is any address), the error is a *TakenError.
func (s *Store) AddHostPort(p HostPort) error {
	wasKnown, err := s.addNumber(p)
	if err == nil && wasKnown { // else nobody has it
		err = s.checkOverlap(p)
	}
	if err != nil {
		return err
	}
	key := hostPortKey(p)
	value := bpf.HostPort{
		Owner:       uint64(p.Owner),
		TargetAddr:  wireAddr(p.ContainerAddr),
		Network:     uint32(p.Network),
		TargetPort:  p.ContainerPort,
		SrcRangeSet: uint32(p.SrcRanges),
	}
	s.changed = true
	err = create(s.dp.HostPorts, &key, &value)
	if err == nil {
		return s.addReverse(p)
	}
	if holder, found, _ := GetHostPort(s.dp, p); errors.Is(err, ErrTaken) && found {
		return p.takenBy(holder)
	}
	return fmt.Errorf("create host port %s/%s: %w", p.hostSide(), p.Protocol, err)
}

// checkOverlap returns a *TakenError if another attachment has the port on any address and p on
// one, or vice versa: one of the two would lose clients to the other.
func (s *Store) checkOverlap(p HostPort) error {
	if !p.HostAddr.IsUnspecified() {
		everywhere := p
		everywhere.HostAddr = netip.IPv6Unspecified()
		if p.HostAddr.Is4() {
			everywhere.HostAddr = netip.IPv4Unspecified()
		}
		holder, found, err := GetHostPort(s.dp, everywhere)
		if found && holder.Owner != p.Owner {
			return p.takenBy(holder)
		}
		return err
	}
	specific, err := s.specificHostPorts()
	for _, holder := range specific {
		if holder.HostPort == p.HostPort && holder.Protocol == p.Protocol &&
			holder.HostAddr.Is4() == p.HostAddr.Is4() && holder.Owner != p.Owner {
			return p.takenBy(holder)
		}
	}
	return err
}

// specificHostPorts returns the host ports on one address, in one walk for all of a container's.
func (s *Store) specificHostPorts() ([]HostPort, error) {
	if s.specific != nil {
		return s.specific, nil
	}
	all, err := HostPorts(s.dp)
	if err != nil {
		return nil, err
	}
	s.specific = slices.DeleteFunc(all, func(p HostPort) bool { return p.HostAddr.IsUnspecified() })
	return s.specific, nil
}

// addNumber marks a host port's number, and reports whether it was known before s. The marks
// stay, because clients may send for longer than the host port exists.
func (s *Store) addNumber(p HostPort) (wasKnown bool, err error) {
	if err := s.dp.OpenOnDemand(bpf.MapPortMarks); err != nil {
		return false, err
	}
	if !p.HostAddr.IsUnspecified() {
		if _, err := s.setNumber(p, bpf.PortForwardedExact); err != nil {
			return false, err
		}
	}
	return s.setNumber(p, bpf.PortForwarded)
}

// setNumber sets a byte of port_marks, and reports whether it was set before s. It writes the whole
// word: no program writes those of host ports' marks, and other writers wait for the lock.
func (s *Store) setNumber(p HostPort, mark uint32) (wasSet bool, err error) {
	const perWord, perProtocol = 8, 1 << 16

	place := mark*perProtocol + uint32(p.HostPort)
	if p.Protocol == UDP {
		place += perProtocol
	}
	var word [perWord]byte
	if err := s.dp.PortMarks.Lookup(place/perWord, &word); err != nil {
		return false, fmt.Errorf("look up the number of host port %s/%s: %w", p.hostSide(), p.Protocol, err)
	}
	if word[place%perWord] != 0 {
		return !s.newNumbers[place], nil
	}
	word[place%perWord] = 1
	if err := s.dp.PortMarks.Put(place/perWord, word); err != nil {
		return false, fmt.Errorf("put the number of host port %s/%s: %w", p.hostSide(), p.Protocol, err)
	}
	s.newNumbers[place] = true
	return false, nil
}

// addReverse creates the entry that translates the container's port back to the host
// port. If several host ports are forwarded to one container port, the first one is used.
func (s *Store) addReverse(p HostPort) error {
	key := bpf.HostPortKey{
		Addr:     wireAddr(p.ContainerAddr),
		Port:     p.ContainerPort,
		Protocol: uint8(p.Protocol),
		Dir:      bpf.HostPortReverse,
	}
	value := bpf.HostPort{
		Owner:      uint64(p.Owner),
		TargetAddr: wireAddr(p.HostAddr),
		Network:    uint32(p.Network),
		TargetPort: p.HostPort,
	}
	if err := create(s.dp.HostPorts, &key, &value); err != nil && !errors.Is(err, ErrTaken) {
		return fmt.Errorf("create the reverse entry of host port %s/%s: %w", p.hostSide(), p.Protocol, err)
	}
	return nil
}

// GetHostPort returns the host port with p's host address, port and protocol, and
// whether it exists.
func GetHostPort(dp *loader.Datapath, p HostPort) (HostPort, bool, error) {
	key := hostPortKey(p)
	var value bpf.HostPort
	err := dp.HostPorts.Lookup(&key, &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return HostPort{}, false, nil
	}
	if err != nil {
		return HostPort{}, false, fmt.Errorf("look up host port %s/%s: %w", p.hostSide(), p.Protocol, err)
	}
	return hostPortOf(key, value), true, nil
}

// HostPorts lists all host ports, in no particular order.
func HostPorts(dp *loader.Datapath) ([]HostPort, error) {
	var list []HostPort
	for entry, err := range entries[bpf.HostPortKey, bpf.HostPort](dp.HostPorts) {
		if err != nil {
			return nil, err
		}
		if entry.key.Dir == bpf.HostPortForward {
			list = append(list, hostPortOf(entry.key, entry.value))
		}
	}
	return list, nil
}

func hostPortKey(p HostPort) bpf.HostPortKey {
	return bpf.HostPortKey{
		Addr:     wireAddr(p.HostAddr),
		Port:     p.HostPort,
		Protocol: uint8(p.Protocol),
	}
}

func hostPortOf(key bpf.HostPortKey, value bpf.HostPort) HostPort {
	return HostPort{
		HostAddr:      addrOf(key.Addr),
		HostPort:      key.Port,
		Protocol:      Protocol(key.Protocol),
		ContainerAddr: addrOf(value.TargetAddr),
		ContainerPort: value.TargetPort,
		SrcRanges:     PrefixSet(value.SrcRangeSet),
		Owner:         loader.Owner(value.Owner),
		Network:       Network(value.Network),
	}
}
