package admin

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/names"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Totals are the figures of a host. The number of system calls hardly grows with the number of containers.
// TotalsOptions select figures that cost more.
type Totals struct {
	Config   bpf.HostConfig // of the loaded programs
	Pins     string         // their directory
	Uplinks  []string
	Warnings []string // about the host
	Maps     []MapUse // without the entries of those that traffic fills, unless AllMaps asks for them
	Drops    []maps.DropCount
	Networks map[string]NetworkTotals // by name

	FlowTableUse float64 // share of the places whose flows are not replaced

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
	Flows                                    int // that it owns

	index int // of the device: the counters of another one begin at 0
}

// TotalsOptions select additional figures.
type TotalsOptions struct {
	DataDir    string // of the records; "": the default
	Flows      bool   // walk over all flows
	Containers bool   // ask for each container's counters
	AllMaps    bool   // count the entries of all maps
	// ContainerFlows counts the flows of each container, by a walk over all.
	ContainerFlows bool
}

// mapsOfContainers have a few entries for each container, and so can be counted at any time.
var mapsOfContainers = []string{bpf.MapDevices, bpf.MapDrops, bpf.MapEndpoints, bpf.MapHostPorts, bpf.MapUplinks}

// ReadTotals reads the figures of the calling thread's network namespace.
func ReadTotals(options TotalsOptions) (*Totals, error) {
	o, err := openHost(loader.OpenLoaded)
	if err != nil {
		return nil, err
	}
	defer o.Close()

	entries, err := maps.Devices(o.datapath) // before the host's devices: one that is new meanwhile is not dead
	if err != nil {
		return nil, err
	}
	devices, err := o.devices()
	if err != nil {
		return nil, err
	}
	t := &Totals{Config: o.datapath.Config, Pins: o.datapath.Dir()}
	return t, errors.Join(t.addHost(o, devices), t.addMaps(o.datapath, options),
		t.addAttachments(o.datapath, entries, devices, options), t.addFlows(o.datapath, options))
}

func (t *Totals) addHost(o *Host, devices map[int]netlink.Link) error {
	uplinks, errUplinks := maps.Uplinks(o.datapath)
	for _, uplink := range uplinks {
		if device := devices[uplink.IfIndex]; device != nil && !uplink.ContainerBridge {
			t.Uplinks = append(t.Uplinks, device.Attrs().Name)
		}
	}
	var errWarnings error
	t.Warnings, errWarnings = o.Warnings()
	return errors.Join(errUplinks, errWarnings)
}

func (t *Totals) addMaps(datapath *loader.Datapath, o TotalsOptions) (err error) {
	counted := mapsOfContainers
	if o.AllMaps {
		counted = nil
	}
	var errDrops error
	t.Maps, err = mapUses(datapath, counted)
	t.Drops, errDrops = maps.DropTotals(datapath)
	return errors.Join(err, errDrops)
}

func (t *Totals) addFlows(datapath *loader.Datapath, o TotalsOptions) (err error) {
	t.FlowTableUse, err = maps.FlowTableUse(datapath)
	if err != nil || !o.Flows {
		return err
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
	return errors.Join(err, t.addContainers(datapath, members, records), t.addContainerFlows(datapath, o))
}

// countNetworks counts the attachments of each network by its name. The names are in the aliases of devices: a record is
// read only if no device has the name.
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
		c := ContainerTotals{
			Attachment: m.names,
			Owner:      m.entry.Owner.String(),
			Device:     m.device.Attrs().Name,
			Drops:      byOwner[m.entry.Owner],
			index:      m.entry.IfIndex,
		}
		c.addCounters(peers, m.device)
		t.Containers = append(t.Containers, c)
	}
	return nil
}

// addCounters reads what has left the container at the host's end, and what has come in at the container's end: what
// bypasses the host's end is counted only there (since Linux 6.8; before, nowhere).
func (c *ContainerTotals) addCounters(peers *rtnl.Peers, device netlink.Link) {
	if s := device.Attrs().Statistics; s != nil {
		c.OutPackets, c.OutBytes, c.InPackets, c.InBytes = s.RxPackets, s.RxBytes, s.TxPackets, s.TxBytes
	}
	inside, err := peers.Of(device)
	if err == nil && inside.Attrs().Statistics != nil {
		c.InPackets, c.InBytes = inside.Attrs().Statistics.RxPackets, inside.Attrs().Statistics.RxBytes
	}
}

func (c *ContainerTotals) dropped() (packets uint64) {
	for _, d := range c.Drops {
		if d.Reason.IsDrop() {
			packets += d.Packets
		}
	}
	return packets
}

func (t *Totals) addContainerFlows(datapath *loader.Datapath, o TotalsOptions) error {
	if !o.ContainerFlows {
		return nil
	}
	flows, err := maps.FlowEntries(datapath)
	byOwner := map[string]int{}
	for _, f := range flows {
		if !f.Expired {
			byOwner[f.Owner.String()]++
		}
	}
	for i := range t.Containers {
		t.Containers[i].Flows = byOwner[t.Containers[i].Owner]
	}
	return err
}

// MapUse is a pinned map with its entries and its memory.
type MapUse struct {
	Name       string `json:"name"`
	Entries    *int   `json:"entries,omitempty"` // nil for arrays and queues
	MaxEntries uint32 `json:"maxEntries"`
	Bytes      uint64 `json:"bytes"` // as the kernel accounts them
}

// mapUses lists all pinned maps, so the sum of bytes is the memory of ebpfnet's maps. It counts entries of some maps, or
// of all if counted is nil, by walking over them.
func mapUses(datapath *loader.Datapath, counted []string) ([]MapUse, error) {
	entries, err := maps.Count(datapath, counted...)
	if err != nil {
		return nil, err
	}
	pins, err := filepath.Glob(filepath.Join(datapath.Dir(), "maps", "*"))
	if err != nil {
		return nil, err
	}
	var all []MapUse
	for _, pin := range pins {
		m, err := mapAt(pin)
		if err != nil {
			return nil, fmt.Errorf("inspect map %s: %w", pin, err)
		}
		if count, counted := entries[m.Name]; counted {
			m.Entries = &count
		}
		all = append(all, m)
	}
	return all, nil
}

func mapAt(pin string) (MapUse, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return MapUse{}, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return MapUse{}, err
	}
	bytes, _ := info.Memlock()
	return MapUse{Name: filepath.Base(pin), MaxEntries: m.MaxEntries(), Bytes: bytes}, nil
}
