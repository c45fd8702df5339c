// Package loader owns the datapath's life in the kernel: it loads programs and
// maps once per boot and network namespace, pins them, and attaches the
// programs to devices. What stands in the maps is the business of package maps.
// Functions that find or touch devices do so in the calling thread's network
// namespace, which is the host's in a plugin.
//
// Life cycle, a file each:
//   - load.go: Open finds the pins of the calling thread's network namespace, or
//     loads what the binary embeds when there are none, under a lock, in a
//     temporary directory that one rename publishes: others see all or nothing.
//   - attach.go (tcx.go, clsact.go): programs are put on devices and taken off.
//   - upgrade.go: other programs take the place of those that are loaded. The maps
//     stay, and one rename decides.
//   - unload.go: everything goes.
package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/flock"
)

// ABI is the number of the maps' layout that this binary reads and writes: EBPFNET_ABI in bpf/abi.h.
const ABI = 5

// Datapath is a loaded datapath, opened. The caller must Close it. The maps may
// be read at any time; who writes to them holds Lock.
type Datapath struct {
	Endpoints   *ebpf.Map // bpf.DatapathAddr -> bpf.DatapathEndpoint
	Devices     *ebpf.Map // ifindex (uint32) -> bpf.DatapathDevice
	Ports       *ebpf.Map // bpf.DatapathPortKey -> bpf.DatapathPort
	Flows       *ebpf.Map // bpf.DatapathFlowKey -> bpf.DatapathFlow
	Established *ebpf.Map // bpf.DatapathFlowKey -> bpf.DatapathFlow
	OffloadTCP  *ebpf.Map // bpf.DatapathOffloadKey -> bpf.DatapathOffload
	OffloadUDP  *ebpf.Map // bpf.DatapathOffloadKey -> bpf.DatapathOffload
	Ways        *ebpf.Map // bpf.DatapathWayKey -> bpf.DatapathWay
	Exempts     *ebpf.Map // bpf.DatapathPrefixKey -> nothing
	Sources     *ebpf.Map // bpf.DatapathPrefixKey -> nothing
	Uplinks     *ebpf.Map // ifindex (uint32) -> bpf.DatapathUplink
	Counters    *ebpf.Map // bpf.DatapathReason -> bpf.DatapathCounter per CPU
	Drops       *ebpf.Map // bpf.DatapathDropKey -> bpf.DatapathCounter

	// Config is what the programs were loaded with.
	Config bpf.DatapathHostConfig

	dir stateDir
}

// Options are what a datapath can be loaded with. They change nothing of one that
// is loaded already, but for the programs.
type Options struct {
	// MaxFlows is the number of flows that the host remembers; 0: by its memory.
	MaxFlows uint32
	// Attach is how programs are attached; 0: the best that the kernel has.
	Attach bpf.DatapathAttach
	// MasqPorts are the first and last port that masquerading may choose; zero:
	// what ip_local_port_range leaves.
	MasqPorts [2]uint16
	// Timeouts of flows.
	Timeouts Timeouts

	// Programs are those to load; nil: those that are embedded.
	Programs *Programs
}

// Open opens the datapath of the calling thread's network namespace. It loads it
// first where it is not loaded, and replaces programs that are older than this
// binary's. ctx bounds the wait for other processes that do so; the error then
// wraps flock.ErrBusy.
func Open(ctx context.Context, options Options) (*Datapath, error) {
	d, err := openConfig()
	if errors.Is(err, ErrNotLoaded) {
		if err := load(ctx, options); err != nil {
			return nil, fmt.Errorf("load the datapath: %w", err)
		}
		d, err = openConfig()
	}
	if err != nil {
		return nil, err
	}
	if err := d.checkABI(); err != nil {
		return nil, err
	}
	if err := d.renew(ctx, options); err != nil {
		return nil, fmt.Errorf("upgrade the datapath: %w", err)
	}
	return d.opened()
}

// OpenLoaded is Open for those who take the datapath as it is. The error wraps
// ErrNotLoaded where nothing is loaded.
func OpenLoaded() (*Datapath, error) {
	d, err := OpenForRelease()
	if err != nil {
		return nil, err
	}
	if err := d.checkABI(); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// OpenForRelease is OpenLoaded for those who only remove things, which works with
// the datapath of any version. Where its layout is not this binary's, the maps
// are nil but for those whose entries have owners.
func OpenForRelease() (*Datapath, error) {
	d, err := openConfig()
	if err != nil {
		return nil, err
	}
	return d.opened()
}

func (d *Datapath) opened() (*Datapath, error) {
	if err := d.openMaps(); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// Close closes the maps; what is pinned goes on working.
func (d *Datapath) Close() {
	for _, m := range d.maps() {
		(*m).Close()
	}
}

// Lock excludes all other writers of this host until the lock is released. It
// is for a few system calls, never for a wait. ctx bounds the wait for others;
// the error then wraps flock.ErrBusy.
func (d *Datapath) Lock(ctx context.Context) (*flock.Lock, error) {
	return flock.Acquire(ctx, Root, flock.Exclusive)
}

// Dir is the directory of the pins, for messages.
func (d *Datapath) Dir() string { return string(d.dir) }

// NamedMap is a map with its name in bpf/maps.h.
type NamedMap struct {
	Name string
	Map  *ebpf.Map
}

// Maps returns the maps that are open, in the order of their names.
func (d *Datapath) Maps() []NamedMap {
	var all []NamedMap
	for name, m := range d.maps() {
		all = append(all, NamedMap{name, *m})
	}
	slices.SortFunc(all, func(a, b NamedMap) int { return strings.Compare(a.Name, b.Name) })
	return all
}

func (d *Datapath) maps() map[string]**ebpf.Map {
	return map[string]**ebpf.Map{
		bpf.DatapathMapEndpoints:   &d.Endpoints,
		bpf.DatapathMapDevices:     &d.Devices,
		bpf.DatapathMapPorts:       &d.Ports,
		bpf.DatapathMapFlows:       &d.Flows,
		bpf.DatapathMapEstablished: &d.Established,
		bpf.DatapathMapOffloadTcp:  &d.OffloadTCP,
		bpf.DatapathMapOffloadUdp:  &d.OffloadUDP,
		bpf.DatapathMapWays:        &d.Ways,
		bpf.DatapathMapExempts:     &d.Exempts,
		bpf.DatapathMapSources:     &d.Sources,
		bpf.DatapathMapUplinks:     &d.Uplinks,
		bpf.DatapathMapCounters:    &d.Counters,
		bpf.DatapathMapDrops:       &d.Drops,
	}
}

// openConfig opens the datapath but for its maps.
func openConfig() (*Datapath, error) {
	dir, err := hereDir()
	if err != nil {
		return nil, err
	}
	d := &Datapath{dir: dir}
	return d, d.readConfig()
}

// readConfig reads the configuration, which an upgrade replaces. That of another
// version may be longer or shorter: what it does not have is zero.
func (d *Datapath) readConfig() error {
	path := d.dir.mapPin(configPin)
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		// A kernel that refuses BPF does not say whether there is one.
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: no %s", ErrNotLoaded, path)
		}
		return explain(fmt.Errorf("open %s: %w", path, err))
	}
	defer m.Close()

	read, err := m.LookupBytes(uint32(0))
	if err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	value := make([]byte, max(len(read), binary.Size(d.Config)))
	copy(value, read)
	_, err = binary.Decode(value, binary.NativeEndian, &d.Config)
	return err
}

func (d *Datapath) isForeign() bool { return d.Config.Abi != ABI }

func (d *Datapath) checkABI() error {
	if !d.isForeign() {
		return nil
	}
	return fmt.Errorf("%w: its maps have layout %d, this binary knows %d: use the version that loaded them, "+
		"or remove the containers, run `ebpfnetctl unload --yes`, and start them again", ErrIncompatible, d.Config.Abi, ABI)
}

func (d *Datapath) openMaps() error {
	for name, m := range d.maps() {
		if d.isForeign() && !slices.Contains(owned, name) {
			continue
		}
		var err error
		*m, err = ebpf.LoadPinnedMap(d.dir.mapPin(name), nil)
		if d.isForeign() && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open %s: %w", d.dir.mapPin(name), err)
		}
	}
	return nil
}

// owned are the maps whose entries have owners, in every version at the same place.
var owned = []string{
	bpf.DatapathMapDevices, bpf.DatapathMapEndpoints, bpf.DatapathMapPorts,
	bpf.DatapathMapFlows, bpf.DatapathMapEstablished, bpf.DatapathMapDrops,
}
