package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Uplink is a device facing out, with the addresses to masquerade with where
// the kernel cannot name one for a route (before 6.7). Either may be invalid.
type Uplink struct {
	IfIndex int
	Addr4   netip.Addr
	Addr6   netip.Addr
	// ContainerBridge are behind it: it is not to be taken for an uplink, though it has a subnet.
	ContainerBridge bool
}

// String is for people.
func (u Uplink) String() string {
	if u.ContainerBridge {
		return fmt.Sprintf("device %d has containers behind it", u.IfIndex)
	}
	addrs := ""
	for _, addr := range []netip.Addr{u.Addr4, u.Addr6} {
		if addr.IsValid() {
			addrs += " " + addr.String()
		}
	}
	return fmt.Sprintf("device %d faces out with%s", u.IfIndex, addrs)
}

// SetUplink creates or replaces the entry of an uplink.
func (s *Store) SetUplink(u Uplink) error {
	key := uint32(u.IfIndex)
	value := bpf.Uplink{Addr4: wireOrZero(u.Addr4), Addr6: wireOrZero(u.Addr6)}
	if u.ContainerBridge {
		value.ContainerBridge = 1
	}
	if err := s.dp.Uplinks.Put(&key, &value); err != nil {
		return fmt.Errorf("put uplink %d: %w", u.IfIndex, err)
	}
	return nil
}

// DeleteUplink removes the entry of an uplink, if there is one.
func (s *Store) DeleteUplink(ifindex int) error {
	key := uint32(ifindex)
	if err := s.dp.Uplinks.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("delete uplink %d: %w", ifindex, err)
	}
	return nil
}

// Uplinks lists all uplinks, in no order.
func Uplinks(dp *loader.Datapath) ([]Uplink, error) {
	var list []Uplink
	for entry, err := range entries[uint32, bpf.Uplink](dp.Uplinks) {
		if err != nil {
			return nil, err
		}
		list = append(list, Uplink{
			IfIndex:         int(entry.key),
			Addr4:           addrOrNone(entry.value.Addr4),
			Addr6:           addrOrNone(entry.value.Addr6),
			ContainerBridge: entry.value.ContainerBridge != 0,
		})
	}
	return list, nil
}
