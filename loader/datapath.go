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
	"iter"
	"os"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/flock"
)

// ABI is the number of the maps' layout that this binary reads and writes: EBPFNET_ABI in bpf/abi.h.
const ABI = 6

// Datapath is a loaded datapath, opened. The caller must Close it. The maps may
// be read at any time; who writes to them holds Lock.
type Datapath struct {
	// Maps are those that user space reads or writes; the others are nil. Of a datapath
	// with another layout only those with owners are open.
	bpf.Maps

	// Config is what the programs were loaded with.
	Config bpf.HostConfig

	dir stateDir
}

// Options are what a datapath can be loaded with. They change nothing of one that
// is loaded already, but for the programs.
type Options struct {
	// MaxFlows is the number of flows that the host remembers; 0: by its memory.
	MaxFlows uint32
	// Attach is how programs are attached; 0: the best that the kernel has.
	Attach bpf.Attach
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

// OpenMaps returns the open maps by their names in bpf/maps.h.
func (d *Datapath) OpenMaps() map[string]*ebpf.Map {
	open := map[string]*ebpf.Map{}
	for name, m := range d.maps() {
		if *m != nil {
			open[name] = *m
		}
	}
	return open
}

// maps yields the maps that user space has a use for, by name. bpf2go generates the list.
func (d *Datapath) maps() iter.Seq2[string, **ebpf.Map] {
	return func(yield func(string, **ebpf.Map) bool) {
		all := reflect.ValueOf(&d.Maps).Elem()
		for i := range all.NumField() {
			m, isMap := all.Field(i).Addr().Interface().(**ebpf.Map)
			name := all.Type().Field(i).Tag.Get("ebpf")
			if !isMap || slices.Contains(internal, name) {
				continue
			}
			if !yield(name, m) {
				return
			}
		}
	}
}

// internal are the maps that programs use among themselves.
var internal = []string{
	bpf.MapPktScratch, bpf.MapFIBScratch, bpf.MapMasqScratch, bpf.MapFragScratch, bpf.MapMasqProbes, bpf.MapFragments, bpf.MapFragQueue,
}

// openConfig opens the datapath but for its maps.
func openConfig() (*Datapath, error) {
	dir, err := netnsDir()
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
	bpf.MapDevices, bpf.MapEndpoints, bpf.MapHostPorts,
	bpf.MapFlows, bpf.MapFlowsBackup, bpf.MapDrops,
}
