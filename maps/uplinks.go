package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Uplink is an external interface of the host. Its addresses, either of which may be
// invalid, are for masquerading on kernels that do not report a route's source address
// to programs (before 6.7).
type Uplink struct {
	IfIndex int
	Addr4   netip.Addr
	Addr6   netip.Addr
	// ContainerBridge marks a bridge with containers as ports, which is not an uplink although it
	// has a subnet.
	ContainerBridge bool
	// Bridge marks an uplink that is a bridge: with br_netfilter, rules see its packets before the
	// programs do.
	Bridge bool
}

// String describes the uplink for an operator.
func (u Uplink) String() string {
	if u.ContainerBridge {
		return fmt.Sprintf("device %d is a bridge with containers", u.IfIndex)
	}
	addrs := ""
	for _, addr := range []netip.Addr{u.Addr4, u.Addr6} {
		if addr.IsValid() {
			addrs += " " + addr.String()
		}
	}
	return fmt.Sprintf("device %d is an uplink with%s", u.IfIndex, addrs)
}

// SetUplink creates or replaces the entry of an uplink.
func (s *Store) SetUplink(u Uplink) error {
	key := uint32(u.IfIndex)
	value := bpf.Uplink{Addr4: wireOrZero(u.Addr4), Addr6: wireOrZero(u.Addr6)}
	if u.ContainerBridge {
		value.ContainerBridge = 1
	}
	if u.Bridge {
		value.Bridge = 1
	}
	s.changed = true
	if err := s.dp.Uplinks.Put(&key, &value); err != nil {
		return fmt.Errorf("put uplink %d: %w", u.IfIndex, explainFull(s.dp.Uplinks, err))
	}
	return nil
}

// DeleteUplink removes the entry of an uplink, if it exists.
func (s *Store) DeleteUplink(ifindex int) error {
	key := uint32(ifindex)
	s.changed = true
	if err := s.dp.Uplinks.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete uplink %d: %w", ifindex, err)
	}
	return nil
}

// GetUplink returns the entry of an uplink or a container bridge, and whether it exists.
func GetUplink(dp *loader.Datapath, ifindex int) (Uplink, bool, error) {
	var value bpf.Uplink
	err := dp.Uplinks.Lookup(uint32(ifindex), &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Uplink{}, false, nil
	}
	if err != nil {
		return Uplink{}, false, fmt.Errorf("look up uplink %d: %w", ifindex, err)
	}
	return uplinkOf(uint32(ifindex), value), true, nil
}

// Uplinks lists all uplinks and container bridges, in no particular order.
func Uplinks(dp *loader.Datapath) ([]Uplink, error) {
	return collect(dp.Uplinks, uplinkOf)
}

func uplinkOf(key uint32, value bpf.Uplink) Uplink {
	return Uplink{
		IfIndex:         int(key),
		Addr4:           addrOrNone(value.Addr4),
		Addr6:           addrOrNone(value.Addr6),
		ContainerBridge: value.ContainerBridge != 0,
		Bridge:          value.Bridge != 0,
	}
}
