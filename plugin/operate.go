package plugin

import (
	"context"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Host is what an operator does with the datapath of a host, which no runtime asks for.
type Host struct {
	datapath *loader.Datapath
	netlink  *netlink.Handle
	records  record.Dir
	ends     map[loader.Owner]hostEnd
}

// hostEnd is the host's end of an attachment's pair of devices.
type hostEnd struct {
	index int
	name  string // the device's
	who   string // the attachment, for messages
}

// OpenHost opens the datapath of the calling thread's network namespace in one of
// package loader's ways, whose errors it passes on. Records are looked for in directory,
// "" for the usual one. The caller must Close it.
func OpenHost(open func() (*loader.Datapath, error), directory string) (*Host, error) {
	datapath, err := open()
	if err != nil {
		return nil, err
	}
	h := &Host{datapath: datapath, ends: map[loader.Owner]hostEnd{}}
	if h.netlink, err = openHandle(); err == nil {
		err = h.findEnds(dataDir(directory))
	}
	if err != nil {
		h.Close()
		return nil, err
	}
	return h, nil
}

// Close closes what OpenHost has opened.
func (h *Host) Close() {
	h.datapath.Close()
	if h.netlink != nil {
		h.netlink.Close()
	}
}

// findEnds finds the ends of living attachments by what stands at the devices, and in
// the records of chained ones.
func (h *Host) findEnds(directory string) error {
	devices, err := link.List(h.netlink)
	if err != nil {
		return err
	}
	records, err := record.Open(directory)
	if err != nil {
		return err
	}
	h.records = records
	kept, err := records.List()
	if err != nil {
		return err
	}
	chained := map[int]maps.Attachment{}
	for _, r := range kept {
		if r.Chained != nil {
			chained[r.Chained.HostIndex] = r.Attachment
		}
	}
	for _, device := range devices {
		at, ours := attachmentOf(device)
		if !ours {
			at, ours = chained[device.Attrs().Index]
		}
		if ours {
			h.ends[at.Owner()] = hostEnd{device.Attrs().Index, device.Attrs().Name, aliasOf(at)}
		}
	}
	return nil
}

// Usage is what depends on the datapath.
type Usage struct {
	Containers []string
	Uplinks    []string
	HostPorts  int // entries
	Flows      int // entries
}

// Usage counts what depends on the datapath, of whatever version. The uplinks of another
// one are not known.
func (h *Host) Usage() (*Usage, error) {
	u := &Usage{}
	for _, end := range h.ends {
		u.Containers = append(u.Containers, end.who)
	}
	uplinks, err := h.uplinks()
	for _, uplink := range uplinks {
		u.Uplinks = append(u.Uplinks, uplink.Attrs().Name)
	}
	var portsErr, flowsErr error
	u.HostPorts, portsErr = maps.Entries(h.datapath.HostPorts)
	u.Flows, flowsErr = maps.Entries(h.datapath.Flows)
	return u, errors.Join(err, portsErr, flowsErr)
}

// uplinks are those that are there.
func (h *Host) uplinks() ([]netlink.Link, error) {
	all, err := maps.Uplinks(h.datapath)
	if err != nil {
		return nil, err
	}
	var present []netlink.Link
	for _, uplink := range all {
		device, err := link.Device(h.netlink, uplink.IfIndex)
		if err != nil {
			return nil, err
		}
		if device != nil && !uplink.ContainerBridge {
			present = append(present, device)
		}
	}
	return present, nil
}

// Repair puts programs back that are missing from devices, and follows changes of the
// uplinks. It returns what it has mended, in words. It may run beside ADDs and DELs.
func (h *Host) Repair(ctx context.Context) (mended []string, err error) {
	uplinks, err := h.uplinks()
	if err != nil {
		return nil, err
	}
	for _, uplink := range uplinks {
		attached, err := h.datapath.UplinkAttached(uplink.Attrs().Index)
		if err != nil {
			return nil, err
		}
		if !attached {
			mended = append(mended, "programs of uplink "+uplink.Attrs().Name)
		}
	}
	attached, err := h.datapath.LoopbackAttached()
	if err != nil {
		return nil, err
	}
	followed, err := h.follow(ctx)
	if err != nil {
		return nil, err
	}
	mended = append(mended, followed...)
	if now, err := h.datapath.LoopbackAttached(); err == nil && now && !attached {
		mended = append(mended, "program of the loopback device")
	}
	return mended, maps.With(ctx, h.datapath, func(*maps.Store) error {
		for _, end := range h.ends {
			attached, err := h.datapath.EndpointAttached(end.index)
			if err != nil {
				return err
			}
			if attached {
				continue
			}
			if err := h.datapath.AttachEndpoint(end.index); err != nil {
				return err
			}
			mended = append(mended, fmt.Sprintf("program of %s (%s)", end.name, end.who))
		}
		return nil
	})
}

// Unload takes all programs off, and removes all pins. Devices, addresses and routes of containers
// stay: they reach each other and the host, but nothing is translated any more.
func (h *Host) Unload(ctx context.Context) error { return h.datapath.Unload(ctx) }
