package plugin

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// uplinkNames are patterns of the names of a network's uplinks. With none the routes tell.
type uplinkNames []string

// check refuses what no device can be called.
func (n uplinkNames) check() error {
	for i, name := range n {
		if _, err := path.Match(name, ""); name == "" || err != nil {
			return invalid(fmt.Sprintf("uplinks[%d]", i), name, "the name of a device, or a pattern like eth*")
		}
	}
	if n != nil && len(n) == 0 {
		return invalid("uplinks", []string{}, "a name at least, or no such key: then the routes tell")
	}
	return nil
}

// chooser is for link.Uplinks. No pattern means the host's ends of containers.
func (n uplinkNames) chooser() func(netlink.Link) bool {
	if n == nil {
		return nil
	}
	return func(device netlink.Link) bool {
		_, ours := attachmentOf(device)
		return !ours && slices.ContainsFunc(n, func(pattern string) bool {
			matches, _ := path.Match(pattern, device.Attrs().Name)
			return matches
		})
	}
}

// refreshUplinks makes the datapath's uplinks those of the host: new ones get
// programs, addresses are written where they changed, and what belongs to
// devices that are gone is removed. Without a change it only reads. A device stays an
// uplink for other networks, even if this one's names do not mean it.
func refreshUplinks(ctx context.Context, host *netlink.Handle, datapath *loader.Datapath, names uplinkNames) error {
	found, err := link.Uplinks(host, names.chooser())
	if err != nil {
		return err
	}
	written, err := maps.Uplinks(datapath)
	if err != nil {
		return err
	}
	known := map[int]maps.Uplink{}
	for _, uplink := range written {
		known[uplink.IfIndex] = uplink
	}

	var changed []maps.Uplink
	for _, uplink := range found {
		if known[uplink.Index].ContainerBridge {
			delete(known, uplink.Index)
			continue
		}
		wanted := maps.Uplink{IfIndex: uplink.Index, Addr4: uplink.Addr4, Addr6: uplink.Addr6}
		attached, err := datapath.UplinkAttached(uplink.Index)
		if err != nil {
			return err
		}
		if !attached || known[uplink.Index] != wanted {
			changed = append(changed, wanted)
		}
		delete(known, uplink.Index)
	}
	gone, err := goneDevices(host, known)
	if err != nil || len(changed)+len(gone) == 0 {
		return err
	}
	return maps.With(ctx, datapath, func(store *maps.Store) error {
		return errors.Join(addUplinks(host, datapath, store, changed), removeUplinks(datapath, store, gone))
	})
}

// follow does for all networks of the host what a STATUS of each would do, and says what was new.
func (h *Host) follow(ctx context.Context) (done []string, err error) {
	off, err := link.ForwardingIsOff(true, true)
	if err != nil {
		return nil, err
	}
	before, err := h.uplinks()
	if err != nil {
		return nil, err
	}
	choices, err := h.uplinkChoices()
	if err != nil {
		return nil, err
	}
	for _, names := range choices {
		if err := mend(ctx, h.datapath, names); err != nil {
			return nil, err
		}
	}
	after, err := h.uplinks()
	if err != nil {
		return nil, err
	}
	for _, uplink := range after {
		same := func(u netlink.Link) bool { return u.Attrs().Index == uplink.Attrs().Index }
		if !slices.ContainsFunc(before, same) {
			done = append(done, "programs of the new uplink "+uplink.Attrs().Name)
		}
	}
	stillOff, err := link.ForwardingIsOff(true, true)
	for _, name := range off {
		if err == nil && !slices.Contains(stillOff, name) {
			done = append(done, "forwarding, by "+name)
		}
	}
	return done, err
}

// uplinkChoices are the different names of uplinks that the networks of living containers have.
func (h *Host) uplinkChoices() (map[string]uplinkNames, error) {
	choices := map[string]uplinkNames{}
	for owner := range h.ends {
		kept, err := h.records.Read(owner)
		if err != nil {
			return nil, err
		}
		var names uplinkNames
		if kept != nil {
			names = kept.Uplinks
		}
		choices[strings.Join(names, " ")] = names
	}
	return choices, nil
}

func addUplinks(host *netlink.Handle, datapath *loader.Datapath, store *maps.Store, uplinks []maps.Uplink) error {
	for _, uplink := range uplinks {
		device, err := link.Device(host, uplink.IfIndex)
		if err != nil {
			return err
		}
		if device == nil {
			continue
		}
		header, known := link.HeaderOf(device)
		if !known {
			continue
		}
		if err := store.SetUplink(uplink); err != nil {
			return err
		}
		if err := datapath.AttachUplink(uplink.IfIndex, header); err != nil {
			return err
		}
	}
	return nil
}

// keepFromUplinks makes a bridge that containers are behind no uplink, whatever it
// was taken for before. The caller holds the lock.
func keepFromUplinks(datapath *loader.Datapath, store *maps.Store, ifindex int) error {
	return errors.Join(
		datapath.DetachUplink(ifindex),
		store.SetUplink(maps.Uplink{IfIndex: ifindex, ContainerBridge: true}),
	)
}

func removeUplinks(datapath *loader.Datapath, store *maps.Store, gone []int) error {
	var errs []error
	for _, index := range gone {
		errs = append(errs, datapath.DetachUplink(index), store.DeleteUplink(index))
	}
	return errors.Join(errs...)
}

// goneDevices returns those that no longer exist. A device that merely lost its
// routes keeps its programs, for the connections that still use it.
func goneDevices(host *netlink.Handle, uplinks map[int]maps.Uplink) ([]int, error) {
	var gone []int
	for index := range uplinks {
		device, err := link.Device(host, index)
		if err != nil {
			return nil, err
		}
		if device == nil {
			gone = append(gone, index)
		}
	}
	return gone, nil
}
