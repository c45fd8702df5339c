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
	name  string // the device's; "" where it is gone
	who   string // the attachment, for messages
}

// OpenHost opens what is loaded in the calling thread's network namespace; the error
// wraps loader.ErrNotLoaded where nothing is. Records are looked for in dataDir, "" for the
// usual one. The caller must Close it.
func OpenHost(directory string) (*Host, error) {
	datapath, err := loader.OpenLoaded()
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

func (h *Host) findEnds(directory string) error {
	endpoints, err := maps.Endpoints(h.datapath)
	if err != nil {
		return err
	}
	records, err := record.Open(directory)
	if err != nil {
		return err
	}
	h.records = records
	for _, endpoint := range endpoints {
		end := hostEnd{index: endpoint.IfIndex}
		kept, err := records.Read(endpoint.Owner)
		if err != nil {
			return err
		}
		if kept != nil && kept.Chained != nil {
			end.index, end.who = kept.Chained.HostIndex, aliasOf(kept.Attachment)
		}
		device, err := link.Device(h.netlink, end.index)
		if err != nil {
			return err
		}
		if device != nil {
			end.name = device.Attrs().Name
		}
		if device != nil && end.who == "" {
			end.who = device.Attrs().Alias
		}
		h.ends[endpoint.Owner] = end
	}
	return nil
}

// Usage is what depends on the datapath.
type Usage struct {
	Containers []string `json:"containers"` // those that live
	Uplinks    []string `json:"uplinks"`
	HostPorts  int      `json:"hostPorts"`
	Flows      int      `json:"flows"`
}

// Usage counts what depends on the datapath.
func (h *Host) Usage() (*Usage, error) {
	u := &Usage{Containers: []string{}, Uplinks: []string{}}
	for _, end := range h.ends {
		if end.name != "" {
			u.Containers = append(u.Containers, end.who)
		}
	}
	uplinks, err := h.uplinks()
	for _, uplink := range uplinks {
		u.Uplinks = append(u.Uplinks, uplink.Attrs().Name)
	}
	ports, portsErr := maps.Ports(h.datapath)
	flows, flowsErr := maps.Flows(h.datapath)
	u.HostPorts, u.Flows = len(ports), len(flows)
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
		if device != nil && !uplink.Containers {
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
	attached, err := h.datapath.HostAttached()
	if err != nil {
		return nil, err
	}
	if err := mend(ctx, h.datapath); err != nil {
		return nil, err
	}
	if now, err := h.datapath.HostAttached(); err == nil && now && !attached {
		mended = append(mended, "program of the loopback device")
	}
	return mended, maps.With(ctx, h.datapath, func(*maps.Store) error {
		for owner, end := range h.ends {
			if end.name == "" {
				continue // the runtime's DEL or GC sweeps up after it
			}
			attached, err := h.datapath.EndpointAttached(owner, end.index)
			if err != nil {
				return err
			}
			if attached {
				continue
			}
			if err := h.datapath.AttachEndpoint(owner, end.index); err != nil {
				return err
			}
			mended = append(mended, fmt.Sprintf("program of %s (%s)", end.name, end.who))
		}
		return nil
	})
}

// Unload takes all programs off, and removes all pins. Devices, addresses and routes of containers
// stay: they reach each other and the host, but nothing is translated any more.
func (h *Host) Unload(ctx context.Context) error {
	lock, err := h.datapath.Lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Release()

	errs := []error{h.datapath.DetachHost()}
	uplinks, err := maps.Uplinks(h.datapath)
	errs = append(errs, err)
	for _, uplink := range uplinks {
		errs = append(errs, h.datapath.DetachUplink(uplink.IfIndex))
	}
	for owner, end := range h.ends {
		errs = append(errs, h.datapath.DetachEndpoint(owner, end.index))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return h.datapath.Remove()
}
