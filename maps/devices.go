package maps

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Device is the host's end of a container's veth, with the container's permissions.
type Device struct {
	IfIndex    int
	Owner      loader.Owner
	Network    Network
	Container  Container
	MAC        net.HardwareAddr // of the container's end, 6 bytes
	Addr4      netip.Addr       // the container's first address; invalid: none
	Addr6      netip.Addr
	Gateway4   netip.Addr // on the host
	Gateway6   netip.Addr
	AntiSpoof  bool        // the container may send only from its own MAC and IP addresses
	Bridged    bool        // the device is a bridge port, so others receive the container's broadcasts
	AnyAddress bool        // the container has no addresses from us, and may use unassigned ones
	Shaped     bool        // a qdisc on the device limits the rate, so no packet may bypass it
	IsPod      bool        // of a cluster: Container is its PodToken
	Policy     PolicyIndex // 0: no rules
	Routes     PrefixSet   // routes with gateways; 0: none
}

var deviceFlags = []struct {
	flag  bpf.DeviceFlags
	field func(*Device) *bool
}{
	{bpf.DeviceAntiSpoof, func(d *Device) *bool { return &d.AntiSpoof }},
	{bpf.DeviceBridged, func(d *Device) *bool { return &d.Bridged }},
	{bpf.DeviceAnyAddress, func(d *Device) *bool { return &d.AnyAddress }},
	{bpf.DeviceShaped, func(d *Device) *bool { return &d.Shaped }},
	{bpf.DevicePod, func(d *Device) *bool { return &d.IsPod }},
}

// PutDevice creates or replaces the entry of d.IfIndex. It cannot collide with another
// attachment's entry, because an ifindex belongs to one device at a time.
func (s *Store) PutDevice(d Device) error {
	value := bpf.Device{
		Owner:     uint64(d.Owner),
		Network:   uint32(d.Network),
		Container: uint64(d.Container),
		Addr4:     wireOrZero(d.Addr4),
		Addr6:     wireOrZero(d.Addr6),
		Gateway4:  wireOrZero(d.Gateway4),
		Gateway6:  wireOrZero(d.Gateway6),
		Mac:       [6]byte(d.MAC),
		Policy:    uint16(d.Policy),
		RouteSet:  uint32(d.Routes),
	}
	for _, f := range deviceFlags {
		if *f.field(&d) {
			value.Flags |= f.flag
		}
	}
	s.changed = true
	if err := s.dp.Devices.Put(uint32(d.IfIndex), &value); err != nil {
		return fmt.Errorf("put device %d: %w", d.IfIndex, explainFull(s.dp.Devices, err))
	}
	return nil
}

// GetDevice returns the entry of a device, and whether it exists.
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

// Devices lists all container devices, in no particular order.
func Devices(dp *loader.Datapath) ([]Device, error) {
	return collect(dp.Devices, deviceOf)
}

// DevicesOf returns the ifindexes of an owner's devices, of any version: one, unless an attachment was
// added again without a DEL.
func DevicesOf(dp *loader.Datapath, owner loader.Owner) (indexes []int, err error) {
	for entry, err := range rawEntries(dp.Devices) {
		if err != nil {
			return nil, err
		}
		if ownerOf(entry.key, entry.value) == owner {
			indexes = append(indexes, int(binary.NativeEndian.Uint32(entry.key)))
		}
	}
	return indexes, nil
}

// DevicesIn returns the ifindexes of a network's devices, of any version, by their owners.
func DevicesIn(dp *loader.Datapath, network Network) (map[loader.Owner]int, error) {
	devices := map[loader.Owner]int{}
	for entry, err := range rawEntries(dp.Devices) {
		if err != nil {
			return nil, err
		}
		if networkOf(entry.value) == network {
			devices[ownerOf(entry.key, entry.value)] = int(binary.NativeEndian.Uint32(entry.key))
		}
	}
	return devices, nil
}

func deviceOf(key uint32, value bpf.Device) Device {
	d := Device{
		IfIndex:   int(key),
		Owner:     loader.Owner(value.Owner),
		Network:   Network(value.Network),
		Container: Container(value.Container),
		MAC:       value.Mac[:],
		Addr4:     addrOrNone(value.Addr4),
		Addr6:     addrOrNone(value.Addr6),
		Gateway4:  addrOrNone(value.Gateway4),
		Gateway6:  addrOrNone(value.Gateway6),
		Policy:    PolicyIndex(value.Policy),
		Routes:    PrefixSet(value.RouteSet),
	}
	for _, f := range deviceFlags {
		*f.field(&d) = value.Flags&f.flag != 0
	}
	return d
}
