package refresh

import (
	"context"
	"errors"
	"path"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// Matcher returns a predicate for the devices that uplink name patterns select, or nil without patterns: then routes
// and kinds select them. No pattern selects the host's end of a container.
func Matcher(patterns []string) func(netlink.Link) bool {
	if patterns == nil {
		return nil
	}
	return func(device netlink.Link) bool {
		return !isOurs(device) && slices.ContainsFunc(patterns, func(pattern string) bool {
			matches, _ := path.Match(pattern, device.Attrs().Name)
			return matches
		})
	}
}

// isOurs reports whether a device is the host's end of a container's interface.
func isOurs(device netlink.Link) bool {
	_, ours := names.ParseAlias(device.Attrs().Alias)
	return ours
}

// allDevices is the value of newest that makes Uplinks check all devices.
const allDevices = 0

// Found is the result of Uplinks.
type Found struct {
	Uplinks []int    // indexes of the uplinks of all networks
	Missing []string // patterns that select no device yet
}

// Uplinks updates the datapath's uplinks. It attaches programs to new uplinks, also to those that are down or have no
// address yet, so that they work once they are up. It writes changed addresses and removes the entries of devices that
// are gone. With such a change it also looks for policy rules, which costs a dump, and without one it only reads. patterns
// are the network's key uplinks; an uplink that they do not select remains one for other networks.
//
// newest is the device of an ADD, or allDevices: see devicesToCheck.
func Uplinks(ctx context.Context, host *netlink.Handle, datapath *loader.Datapath, patterns []string, newest int) (found Found, err error) {
	known, err := knownUplinks(datapath)
	if err != nil {
		return found, err
	}
	devices, err := devicesToCheck(host, datapath, patterns, known, newest)
	if err != nil {
		return found, err
	}
	found.Missing = unmatched(patterns, devices)
	uplinks, err := link.Uplinks(host, devices, Matcher(patterns))
	if err != nil {
		return found, err
	}
	found.Uplinks = allUplinks(uplinks, known)
	changed, err := takeChanged(datapath, uplinks, known)
	if err != nil {
		return found, err
	}
	gone, err := goneDevices(host, known)
	if err != nil || len(changed)+len(gone) == 0 {
		return found, err
	}
	if err := Rules(ctx, datapath); err != nil {
		return found, err
	}
	return found, maps.With(ctx, datapath, func(store *maps.Store) error {
		return errors.Join(addUplinks(host, datapath, store, changed), removeUplinks(datapath, store, gone))
	})
}

// unmatched returns the patterns that select none of the devices.
func unmatched(patterns []string, devices []netlink.Link) (missing []string) {
	for _, pattern := range patterns {
		if !slices.ContainsFunc(devices, Matcher([]string{pattern})) {
			missing = append(missing, pattern)
		}
	}
	return missing
}

// knownUplinks returns the entries of uplinks and container bridges by their devices.
func knownUplinks(datapath *loader.Datapath) (map[int]maps.Uplink, error) {
	known := map[int]maps.Uplink{}
	written, err := maps.Uplinks(datapath)
	for _, uplink := range written {
		known[uplink.IfIndex] = uplink
	}
	return known, err
}

// allUplinks returns the devices of uplinks that are found or known.
func allUplinks(found []link.Uplink, known map[int]maps.Uplink) (indexes []int) {
	for _, uplink := range found {
		if _, isKnown := known[uplink.Index]; !isKnown {
			indexes = append(indexes, uplink.Index)
		}
	}
	for index, uplink := range known {
		if !uplink.ContainerBridge {
			indexes = append(indexes, index)
		}
	}
	slices.Sort(indexes)
	return indexes
}

// takeChanged returns the entries of uplinks that are new, differ from the known ones, or lack programs. It removes all
// found uplinks from known.
func takeChanged(datapath *loader.Datapath, found []link.Uplink, known map[int]maps.Uplink) (changed []maps.Uplink, err error) {
	for _, uplink := range found {
		before := known[uplink.Index]
		delete(known, uplink.Index)
		if before.ContainerBridge {
			continue
		}
		desired := maps.Uplink{
			IfIndex: uplink.Index, Addr4: uplink.Addr4, Addr6: uplink.Addr6,
			Bridge: before.Bridge, // addUplinks sets it once
		}
		attached, err := datapath.UplinkAttached(uplink.Index)
		if err != nil {
			return nil, err
		}
		if !attached || before != desired {
			changed = append(changed, desired)
		}
	}
	return changed, nil
}

// devicesToCheck returns the devices that patterns may select, or without patterns those that may be uplinks without a
// route. Listing all takes longer with each container, so an ADD looks names up, and without patterns on a host with
// uplinks it checks only the devices that appeared just before its own.
func devicesToCheck(host *netlink.Handle, datapath *loader.Datapath, patterns []string, known map[int]maps.Uplink, newest int) ([]netlink.Link, error) {
	isFirst := true
	for _, uplink := range known {
		isFirst = isFirst && uplink.ContainerBridge
	}
	switch {
	case patterns != nil && !slices.ContainsFunc(patterns, isGlob):
		return devicesNamed(host, patterns)
	case newest == allDevices || patterns != nil || isFirst:
		return link.List(host)
	default:
		return devicesBefore(host, datapath, known, newest)
	}
}

func isGlob(pattern string) bool { return strings.ContainsAny(pattern, `*?[\`) }

func devicesNamed(host *netlink.Handle, names []string) (devices []netlink.Link, err error) {
	for _, name := range names {
		device, err := link.Find(host, name)
		if err != nil {
			return nil, err
		}
		if device != nil {
			devices = append(devices, device)
		}
	}
	return devices, nil
}

// devicesBefore returns the devices between the container of an earlier ADD, which checked those before it, and newest.
// If many devices appeared and disappeared in between, STATUS or repair finds the others.
func devicesBefore(host *netlink.Handle, datapath *loader.Datapath, known map[int]maps.Uplink, newest int) ([]netlink.Link, error) {
	const maxDevices = 8

	var before []netlink.Link
	for index := newest - 1; index >= max(newest-maxDevices, 1); index-- {
		if _, isKnown := known[index]; isKnown {
			continue
		}
		_, isContainer, err := maps.GetDevice(datapath, index)
		if err != nil || isContainer {
			return before, err
		}
		device, err := link.Device(host, index)
		if err != nil {
			return nil, err
		}
		if device != nil {
			before = append(before, device)
		}
	}
	return before, nil
}

// ExcludeBridge marks a bridge of containers, which is never an uplink, even if it was one before. The caller holds the
// datapath's lock.
func ExcludeBridge(datapath *loader.Datapath, store *maps.Store, ifindex int) error {
	return errors.Join(
		datapath.DetachUplink(ifindex),
		store.SetUplink(maps.Uplink{IfIndex: ifindex, ContainerBridge: true}),
	)
}

// addUplinks writes and attaches uplinks that were found before the caller got the lock. An ADD may have made one of them a
// bridge of containers since then.
func addUplinks(host *netlink.Handle, datapath *loader.Datapath, store *maps.Store, uplinks []maps.Uplink) error {
	for _, uplink := range uplinks {
		now, _, err := maps.GetUplink(datapath, uplink.IfIndex)
		if err != nil {
			return err
		}
		if now.ContainerBridge {
			continue
		}
		device, err := link.Device(host, uplink.IfIndex)
		if err != nil {
			return err
		}
		if device == nil {
			continue
		}
		header, ok := link.HeaderOf(device)
		if !ok {
			continue
		}
		uplink.Bridge = link.IsBridge(device)
		if err := store.SetUplink(uplink); err != nil {
			return err
		}
		err = datapath.AttachUplink(uplink.IfIndex, header)
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOLINK) { // the device was deleted meanwhile
			err = store.DeleteUplink(uplink.IfIndex)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func removeUplinks(datapath *loader.Datapath, store *maps.Store, gone []int) error {
	var errs []error
	for _, index := range gone {
		errs = append(errs, datapath.DetachUplink(index), store.DeleteUplink(index))
	}
	return errors.Join(errs...)
}

// goneDevices returns the uplinks whose device no longer exists, or is a port of a bridge or bond now: then packets
// would be translated twice. A device that only lost its routes keeps its programs, for connections that still use it.
func goneDevices(host *netlink.Handle, uplinks map[int]maps.Uplink) ([]int, error) {
	var gone []int
	for index := range uplinks {
		device, err := link.Device(host, index)
		if err != nil {
			return nil, err
		}
		if device == nil || link.IsPort(device) {
			gone = append(gone, index)
		}
	}
	return gone, nil
}
