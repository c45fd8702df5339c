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

// Device is the host's end of a container's veth, and what the container may do there.
type Device struct {
	IfIndex       int
	Owner         loader.Owner
	Network       Network
	Container     Container
	MAC           net.HardwareAddr // of the container's end, 6 bytes
	Addr4         netip.Addr       // the container's first; invalid: none
	Addr6         netip.Addr
	Gateway4      netip.Addr // the host's
	Gateway6      netip.Addr
	AntiSpoof     bool // it sends from its MAC and addresses only
	Bridged       bool // others hear what it sends: it is behind a bridge
	AnyAddress    bool // it was given no addresses, and may use those that nobody has
	Shaped        bool // a queue on it holds what it is sent to a rate, so nothing goes past it
	IngressPolicy Policy
}

// Policy says from which containers of this host a container takes more than replies.
type Policy bpf.Policy

// The policies.
const (
	Open        = Policy(bpf.PolicyOpen)
	SameNetwork = Policy(bpf.PolicySameNetwork)
	Isolated    = Policy(bpf.PolicyIsolated)
)

var policyNames = map[Policy]string{Open: "open", SameNetwork: "same-network", Isolated: "isolated"}

// String is the policy's name in a configuration.
func (p Policy) String() string { return policyNames[p] }

// PolicyOf returns the policy of a name, and whether it is one.
func PolicyOf(name string) (Policy, bool) {
	for policy, known := range policyNames {
		if known == name {
			return policy, true
		}
	}
	return Open, false
}

var deviceFlags = []struct {
	flag  bpf.DeviceFlags
	field func(*Device) *bool
}{
	{bpf.DeviceAntiSpoof, func(d *Device) *bool { return &d.AntiSpoof }},
	{bpf.DeviceBridged, func(d *Device) *bool { return &d.Bridged }},
	{bpf.DeviceAnyAddress, func(d *Device) *bool { return &d.AnyAddress }},
	{bpf.DeviceShaped, func(d *Device) *bool { return &d.Shaped }},
}

// PutDevice creates or replaces the entry of d.IfIndex. There is no taking it from anyone: a
// number is that of one device at a time.
func (s *Store) PutDevice(d Device) error {
	value := bpf.Device{
		Owner:         uint64(d.Owner),
		Network:       uint32(d.Network),
		Container:     uint32(d.Container),
		Addr4:         wireOrZero(d.Addr4),
		Addr6:         wireOrZero(d.Addr6),
		Gateway4:      wireOrZero(d.Gateway4),
		Gateway6:      wireOrZero(d.Gateway6),
		Mac:           [6]byte(d.MAC),
		IngressPolicy: bpf.Policy(d.IngressPolicy),
	}
	for _, f := range deviceFlags {
		if *f.field(&d) {
			value.Flags |= f.flag
		}
	}
	if err := s.dp.Devices.Put(uint32(d.IfIndex), &value); err != nil {
		return fmt.Errorf("put device %d: %w", d.IfIndex, err)
	}
	return nil
}

// GetDevice returns the entry of a device, and whether there is one.
func GetDevice(dp *loader.Datapath, ifindex int) (Device, bool, error) {
	var value bpf.Device
	err := dp.Devices.Lookup(uint32(ifindex), &value)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return Device{}, false, nil
	}
	if err != nil {
		return Device{}, false, fmt.Errorf("look up device %d: %w", ifindex, err)
	}
	return deviceOf(uint32(ifindex), value), true, nil
}

// Devices lists all devices of containers, in no order.
func Devices(dp *loader.Datapath) ([]Device, error) {
	var list []Device
	for entry, err := range entries[uint32, bpf.Device](dp.Devices) {
		if err != nil {
			return nil, err
		}
		list = append(list, deviceOf(entry.key, entry.value))
	}
	return list, nil
}

func deviceOf(key uint32, value bpf.Device) Device {
	d := Device{
		IfIndex:       int(key),
		Owner:         loader.Owner(value.Owner),
		Network:       Network(value.Network),
		Container:     Container(value.Container),
		MAC:           value.Mac[:],
		Addr4:         addrOrNone(value.Addr4),
		Addr6:         addrOrNone(value.Addr6),
		Gateway4:      addrOrNone(value.Gateway4),
		Gateway6:      addrOrNone(value.Gateway6),
		IngressPolicy: Policy(value.IngressPolicy),
	}
	for _, f := range deviceFlags {
		*f.field(&d) = value.Flags&f.flag != 0
	}
	return d
}

// wireOrZero has zeros for none.
func wireOrZero(addr netip.Addr) bpf.Addr {
	if !addr.IsValid() {
		return bpf.Addr{}
	}
	return wireAddr(addr)
}

func addrOrNone(wire bpf.Addr) netip.Addr {
	if wire == (bpf.Addr{}) {
		return netip.Addr{}
	}
	return addrOf(wire)
}
