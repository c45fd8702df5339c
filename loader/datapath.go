// Package loader owns the datapath's life in the kernel: it loads programs and
// maps once per boot and network namespace, pins them, and attaches the
// programs to devices. What stands in the maps is the business of package maps.
// Functions that find or touch devices do so in the calling thread's network
// namespace, which is the host's in a plugin.
//
// Life cycle: Open finds the pins of the calling thread's network namespace, or
// loads what the binary embeds when there are none. Loading happens under a lock
// in a temporary directory, which one rename publishes, so that other processes
// see everything or nothing.
package loader

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/flock"
)

// ABI is the number of the maps' layout that this binary reads and writes: EBPFNET_ABI in bpf/abi.h.
const ABI = 4

// Datapath is a loaded datapath, opened. The caller must Close it. The maps may
// be read at any time; who writes to them holds Lock.
type Datapath struct {
	Endpoints   *ebpf.Map // bpf.DatapathAddr -> bpf.DatapathEndpoint
	Ports       *ebpf.Map // bpf.DatapathPortKey -> bpf.DatapathPort
	Flows       *ebpf.Map // bpf.DatapathFlowKey -> bpf.DatapathFlow
	Established *ebpf.Map // bpf.DatapathFlowKey -> bpf.DatapathFlow
	OffloadTCP  *ebpf.Map // bpf.DatapathOffloadKey -> bpf.DatapathOffload
	OffloadUDP  *ebpf.Map // bpf.DatapathOffloadKey -> bpf.DatapathOffload
	Ways        *ebpf.Map // bpf.DatapathWayKey -> bpf.DatapathWay
	Exempts     *ebpf.Map // bpf.DatapathExemptKey -> nothing
	Uplinks     *ebpf.Map // ifindex (uint32) -> bpf.DatapathUplink
	Counters    *ebpf.Map // bpf.DatapathReason -> bpf.DatapathCounter per CPU

	// Config is what the programs were loaded with.
	Config bpf.DatapathHostConfig

	dir stateDir
}

// Options are what a datapath can be loaded with. They have no effect on one
// that is loaded already.
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
}

// Open opens the datapath of the calling thread's network namespace, and loads
// it first where it is not loaded. ctx bounds the wait for other processes that
// are loading; the error then wraps flock.ErrBusy.
func Open(ctx context.Context, options Options) (*Datapath, error) {
	d, err := OpenLoaded()
	if !errors.Is(err, ErrNotLoaded) {
		return d, err
	}
	if err := load(ctx, options); err != nil {
		return nil, fmt.Errorf("load the datapath: %w", err)
	}
	return OpenLoaded()
}

// OpenLoaded is Open for those who have nothing to do where nothing is loaded:
// the error then wraps ErrNotLoaded.
func OpenLoaded() (*Datapath, error) {
	dir, err := hereDir()
	if err != nil {
		return nil, err
	}
	d := &Datapath{dir: dir}
	if err := d.openConfig(); err != nil {
		return nil, err
	}
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

// Remove removes all pins. Programs that are attached by pinned links come off with
// them; filters, which have no pins, must be off before. The caller holds the lock.
func (d *Datapath) Remove() error {
	if err := os.RemoveAll(string(d.dir)); err != nil {
		return fmt.Errorf("remove the pins: %w", err)
	}
	return nil
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
		bpf.DatapathMapPorts:       &d.Ports,
		bpf.DatapathMapFlows:       &d.Flows,
		bpf.DatapathMapEstablished: &d.Established,
		bpf.DatapathMapOffloadTcp:  &d.OffloadTCP,
		bpf.DatapathMapOffloadUdp:  &d.OffloadUDP,
		bpf.DatapathMapWays:        &d.Ways,
		bpf.DatapathMapExempts:     &d.Exempts,
		bpf.DatapathMapUplinks:     &d.Uplinks,
		bpf.DatapathMapCounters:    &d.Counters,
	}
}

func (d *Datapath) openConfig() error {
	path := d.dir.mapPin(configPin)
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: no %s", ErrNotLoaded, path)
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer m.Close()

	if m.ValueSize() != uint32(unsafe.Sizeof(d.Config)) {
		return fmt.Errorf("%w: %s has %d bytes, expected %d", ErrIncompatible, path, m.ValueSize(), unsafe.Sizeof(d.Config))
	}
	if err := m.Lookup(uint32(0), &d.Config); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if d.Config.Abi != ABI {
		return fmt.Errorf("%w: %s names ABI %d, this binary knows %d", ErrIncompatible, path, d.Config.Abi, ABI)
	}
	return nil
}

func (d *Datapath) openMaps() error {
	for name, m := range d.maps() {
		var err error
		if *m, err = ebpf.LoadPinnedMap(d.dir.mapPin(name), nil); err != nil {
			return fmt.Errorf("open %s: %w", d.dir.mapPin(name), err)
		}
	}
	return nil
}

// load puts the embedded datapath into the kernel and publishes its pins, if no
// other process has done so meanwhile.
func load(ctx context.Context, options Options) error {
	dir, err := prepareRoot()
	if err != nil {
		return err
	}
	lock, err := flock.Acquire(ctx, Root, flock.Exclusive)
	if err != nil {
		return err
	}
	defer lock.Release()

	if _, err := os.Stat(string(dir)); err == nil {
		return nil
	}
	if err := removeLeftovers(dir); err != nil {
		return err
	}
	temp := dir.temporary(os.Getpid())
	if err := pinAll(stateDir(temp), options); err != nil {
		return errors.Join(err, os.RemoveAll(temp))
	}
	if err := os.Rename(temp, string(dir)); err != nil {
		return errors.Join(fmt.Errorf("publish the pins: %w", err), os.RemoveAll(temp))
	}
	return nil
}

func prepareRoot() (stateDir, error) {
	if err := ensureBPFFS(); err != nil {
		return "", err
	}
	if err := os.Mkdir(Root, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("make the directory of the pins: %w", err)
	}
	return hereDir()
}

// removeLeftovers removes what a loader left that was killed. The caller holds the lock.
func removeLeftovers(dir stateDir) error {
	leftovers, err := filepath.Glob(tempPrefix(dir) + "-*")
	if err != nil {
		return err
	}
	for _, path := range leftovers {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove the pins of a loader that was killed: %w", err)
		}
	}
	return nil
}

// pinAll loads the datapath and pins maps and programs below dir.
func pinAll(dir stateDir, options Options) error {
	collection, err := newCollection(options)
	if err != nil {
		return err
	}
	defer collection.Close()

	for _, path := range []string{string(dir), dir.maps(), dir.progs(), dir.links()} {
		if err := os.Mkdir(path, 0o700); err != nil {
			return fmt.Errorf("make a directory of pins: %w", err)
		}
	}
	for name, m := range collection.Maps {
		if name == ".rodata" {
			name = configPin
		}
		if err := m.Pin(dir.mapPin(name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	for name, program := range collection.Programs {
		if err := program.Pin(dir.progPin(name)); err != nil {
			return fmt.Errorf("pin program %s: %w", name, err)
		}
	}
	return nil
}

func newCollection(options Options) (*ebpf.Collection, error) {
	spec, err := Spec(options)
	if err != nil {
		return nil, err
	}
	raiseMemlock()
	collection, err := ebpf.NewCollection(spec)
	if errors.Is(err, os.ErrPermission) || errors.Is(err, ebpf.ErrNotSupported) {
		return nil, fmt.Errorf("%w: %w (needs Linux 5.10 or newer, CAP_BPF and CAP_NET_ADMIN, no lockdown, and before 5.11 no limit of locked memory)", ErrNotSupported, err)
	}
	return collection, err
}

// raiseMemlock is needed before 5.11, where maps count against the limit of
// locked memory; where it may not be raised, loading tells whether it had to be.
// The library's rlimit package would probe for that with a map of its own at the
// start of every process, also of those that load nothing.
func raiseMemlock() {
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited)
}

// Spec returns the embedded datapath, set up for this host.
func Spec(options Options) (*ebpf.CollectionSpec, error) {
	spec, err := bpf.LoadDatapath()
	if err != nil {
		return nil, err
	}
	config, err := chooseConfig(options)
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[bpf.DatapathVarConfig].Set(config); err != nil {
		return nil, fmt.Errorf("set the datapath's configuration: %w", err)
	}
	if options.MaxFlows == 0 {
		options.MaxFlows = flowsFor(memory())
	}
	spec.Maps[bpf.DatapathMapFlows].MaxEntries = options.MaxFlows
	spec.Maps[bpf.DatapathMapEstablished].MaxEntries = options.MaxFlows
	spec.Maps[bpf.DatapathMapOffloadTcp].MaxEntries = options.MaxFlows
	spec.Maps[bpf.DatapathMapOffloadUdp].MaxEntries = options.MaxFlows / 4
	spec.Maps[bpf.DatapathMapWays].MaxEntries = options.MaxFlows
	return spec, nil
}
