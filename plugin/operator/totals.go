package operator

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Totals are the figures of a host. Reading them takes as many system calls for few containers as for many,
// but for parts of a list; what costs more is read only for those who ask.
type Totals struct {
	Config   bpf.HostConfig // of the loaded programs
	Uplinks  []string
	Warnings []string // about the host
	Maps     []MapUse // without the entries of those that traffic fills
	Drops    []maps.DropCount
	Networks map[string]NetworkTotals // by name

	Flows      map[string]int    // by state
	Containers []ContainerTotals // those that live
}

// NetworkTotals counts the attachments of a network.
type NetworkTotals struct {
	Connected int
	Dead      int // their device is gone: DEL or GC removes the rest
}

// ContainerTotals are what an attachment has sent and received since ADD. "In" is towards the container.
type ContainerTotals struct {
	maps.Attachment                          // empty where nothing names it
	Owner, Device                            string
	InPackets, InBytes, OutPackets, OutBytes uint64
	Drops                                    []maps.DropCount
}

// TotalsOptions ask for more.
type TotalsOptions struct {
	DataDir    string // of the records; "": the default
	Flows      bool   // walk over all flows
	Containers bool   // ask for each container's counters
}

// mapsOfContainers have a few entries for each container, and so can be counted at any time.
var mapsOfContainers = []string{bpf.MapDevices, bpf.MapDrops, bpf.MapEndpoints, bpf.MapHostPorts, bpf.MapUplinks}

// ReadTotals reads the figures of the calling thread's network namespace.
func ReadTotals(o TotalsOptions) (*Totals, error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return nil, err
	}
	defer datapath.Close()
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()

	entries, err := maps.Devices(datapath) // before the host's devices: one that is new meanwhile is not dead
	if err != nil {
		return nil, err
	}
	devices, err := link.List(host)
	if err != nil {
		return nil, err
	}
	byIndex := map[int]netlink.Link{}
	for _, device := range devices {
		byIndex[device.Attrs().Index] = device
	}
	t := &Totals{Config: datapath.Config}
	return t, errors.Join(t.addHost(datapath, byIndex), t.addMaps(datapath), t.addAttachments(datapath, entries, byIndex, o),
		t.addFlows(datapath, o))
}

func (t *Totals) addHost(datapath *loader.Datapath, devices map[int]netlink.Link) error {
	uplinks, errUplinks := maps.Uplinks(datapath)
	for _, uplink := range uplinks {
		if device := devices[uplink.IfIndex]; device != nil && !uplink.ContainerBridge {
			t.Uplinks = append(t.Uplinks, device.Attrs().Name)
		}
	}
	var errWarnings error
	t.Warnings, errWarnings = Warnings(datapath)
	return errors.Join(errUplinks, errWarnings)
}

func (t *Totals) addMaps(datapath *loader.Datapath) (err error) {
	var errDrops error
	t.Maps, err = MapUses(datapath, mapsOfContainers...)
	t.Drops, errDrops = maps.DropTotals(datapath)
	return errors.Join(err, errDrops)
}

func (t *Totals) addFlows(datapath *loader.Datapath, o TotalsOptions) error {
	if !o.Flows {
		return nil
	}
	t.Flows = map[string]int{}
	for state := range bpf.FlowStates {
		t.Flows[maps.FlowState(state).String()] = 0
	}
	counts, err := maps.CountFlows(datapath)
	for state, n := range counts {
		t.Flows[state.String()] = n
	}
	return err
}

// member is an attachment with an entry for its device.
type member struct {
	entry  maps.Device
	names  maps.Attachment // empty where nothing names it
	device netlink.Link    // nil: dead
}

func (t *Totals) addAttachments(datapath *loader.Datapath, entries []maps.Device, devices map[int]netlink.Link, o TotalsOptions) error {
	records, err := record.Open(config.DataDir(o.DataDir))
	if err != nil {
		return err
	}
	var members []*member
	for _, entry := range entries {
		m := &member{entry: entry, device: devices[entry.IfIndex]}
		if m.device != nil {
			if label, ok := names.ParseAlias(m.device.Attrs().Alias); ok && label.Owner == entry.Owner {
				m.names = label.Attachment
			}
		}
		members = append(members, m)
	}
	err = t.countNetworks(members, records)
	if !o.Containers {
		return err
	}
	return errors.Join(err, t.addContainers(datapath, members, records))
}

// countNetworks counts by name. Only where no device has the name of a network, a record is read.
func (t *Totals) countNetworks(members []*member, records record.Dir) error {
	known := map[maps.Network]string{}
	for _, m := range members {
		if m.names.Network != "" {
			known[m.entry.Network] = m.names.Network
		}
	}
	t.Networks = map[string]NetworkTotals{}
	for _, m := range members {
		if known[m.entry.Network] == "" {
			if err := m.readNames(records); err != nil {
				return err
			}
			known[m.entry.Network] = m.names.Network
		}
		name := known[m.entry.Network]
		if name == "" {
			name = fmt.Sprintf("%08x", uint32(m.entry.Network))
		}
		count := t.Networks[name]
		if m.device == nil {
			count.Dead++
		} else {
			count.Connected++
		}
		t.Networks[name] = count
	}
	return nil
}

func (m *member) readNames(records record.Dir) error {
	rec, err := records.Read(m.entry.Owner)
	if rec != nil {
		m.names = rec.Attachment
	}
	return err
}

func (t *Totals) addContainers(datapath *loader.Datapath, members []*member, records record.Dir) error {
	drops, err := maps.Drops(datapath)
	if err != nil {
		return err
	}
	byOwner := map[loader.Owner][]maps.DropCount{}
	for _, d := range drops {
		byOwner[d.Owner] = append(byOwner[d.Owner], d.DropCount)
	}
	peers, err := rtnl.OpenPeers()
	if err != nil {
		return err
	}
	defer peers.Close()

	for _, m := range members {
		if m.device == nil {
			continue
		}
		if m.names == (maps.Attachment{}) {
			if err := m.readNames(records); err != nil {
				return err
			}
		}
		c := devicesCounters(peers, m.device)
		t.Containers = append(t.Containers, ContainerTotals{
			Attachment: m.names,
			Owner:      m.entry.Owner.String(),
			Device:     m.device.Attrs().Name,
			InPackets:  c.inPackets, InBytes: c.inBytes, OutPackets: c.outPackets, OutBytes: c.outBytes,
			Drops: byOwner[m.entry.Owner],
		})
	}
	return nil
}
