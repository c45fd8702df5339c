// Package loader manages the datapath's life in the kernel. It loads programs and
// maps once per boot and network namespace, pins them, and attaches the programs
// to devices. Package maps owns the content of the maps.
//
// Functions that find or change devices do so in the calling thread's network
// namespace, which in a plugin is the host's.
//
// Life cycle, one file per stage:
//   - load.go: Open finds the pins of the network namespace. If there are none, it
//     loads the embedded programs under a lock, into a temporary directory that one
//     rename publishes: other processes see all of it or nothing.
//   - attach.go (tcx.go, clsact.go): attaches programs to devices and detaches them.
//   - upgrade.go: replaces the loaded programs by others. The maps stay, and one
//     rename decides which programs are in use.
//   - unload.go: removes everything.
//   - copy.go (testrun.go): copies the programs, to try what they would do to a packet.
//
// registry.go has the decisions about maps. The package imports bpf and its own leaf
// packages flock and rtnl; maps, the plugin and the commands import it.
package loader

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader/flock"
)

// ABI is the version of the map layout that this binary reads and writes: EBPFNET_ABI
// in bpf/abi.h.
const ABI = 13

// Datapath is an open, loaded datapath. The caller must Close it. Anyone may read
// the maps at any time; a writer holds Lock.
type Datapath struct {
	// Maps are those that the function that opened the datapath opens. The others
	// are nil.
	bpf.Maps

	// Config is the configuration of the loaded programs.
	Config bpf.HostConfig

	dir    stateDir
	loaded uint64 // the inode of dir: another load has another one
	memory []byte // MapPolicies
}

// Options configure a datapath when it is loaded. A loaded datapath keeps its own
// options, except for Programs.
type Options struct {
	// MaxFlows is the number of flows that the host remembers; 0: in proportion to its memory.
	MaxFlows uint32
	// Attach is the way to attach programs; 0: tcx if the kernel has it, else clsact.
	Attach bpf.Attach
	// Programs to load; nil: those embedded in the binary.
	Programs *Programs
}

// Open opens the datapath of the calling thread's network namespace, with the maps
// that every ADD writes. It loads the datapath first if necessary, and replaces
// programs older than this binary's. ctx bounds the wait for other processes that
// do the same; the error then wraps flock.ErrBusy.
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
	if err := d.upgradeIfOlder(ctx, options); err != nil {
		return nil, fmt.Errorf("upgrade the datapath: %w", err)
	}
	return d.openMaps(func(traits mapTraits) bool { return traits.inADD })
}

// OpenLoaded opens the datapath as it is, with all maps that user space uses. The
// error wraps ErrNotLoaded if it is not loaded, and ErrIncompatible if it has
// another map layout.
func OpenLoaded() (*Datapath, error) {
	d, err := openConfig()
	if err != nil {
		return nil, err
	}
	if err := d.checkABI(); err != nil {
		return nil, err
	}
	return d.openMaps(func(traits mapTraits) bool { return !traits.onDemand })
}

// OpenForRelease opens the datapath for a caller that only removes entries. It works with
// the datapath of any version; if that has another map layout, only the maps whose
// entries have owners are open.
func OpenForRelease() (*Datapath, error) {
	d, err := openConfig()
	if err != nil {
		return nil, err
	}
	return d.openMaps(func(traits mapTraits) bool { return traits.owned || traits.inADD && !d.isForeign() })
}

// IfLoaded calls use with the datapath that OpenLoaded or OpenForRelease opens. It does nothing if the datapath is not
// loaded, and ignores that it was unloaded meanwhile.
func IfLoaded(open func() (*Datapath, error), use func(*Datapath) error) error {
	d, err := open()
	if err == nil {
		defer d.Close()
		err = use(d)
	}
	if errors.Is(err, ErrNotLoaded) {
		return nil
	}
	return err
}

// Close closes the maps. The datapath keeps running.
func (d *Datapath) Close() {
	if d.memory != nil {
		_ = unix.Munmap(d.memory)
		d.memory = nil
	}
	for _, m := range d.registered() {
		(*m).Close()
	}
}

// MapPolicies returns the map of that name as memory, until Close; nil: there is no such map.
func (d *Datapath) MapPolicies() (memory []byte, err error) {
	if d.memory != nil {
		return d.memory, nil
	}
	if err := d.OpenOnDemand(bpf.MapPolicies); err != nil || d.Policies == nil {
		return nil, err
	}
	page := unix.Getpagesize()
	size := (int(d.Policies.MaxEntries()*d.Policies.ValueSize()) + page - 1) / page * page
	if d.memory, err = unix.Mmap(d.Policies.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, fmt.Errorf("map %v: %w", d.Policies, err)
	}
	return d.memory, nil
}

// Lock excludes all other writers on this host until the lock is released. Hold it
// for a few system calls, and never while waiting. ctx bounds the wait for other
// writers; the error then wraps flock.ErrBusy. It wraps ErrNotLoaded if the datapath was unloaded since it was opened.
func (d *Datapath) Lock(ctx context.Context) (*flock.Lock, error) {
	lock, err := flock.Acquire(ctx, Root, flock.Exclusive)
	if err != nil {
		return nil, err
	}
	if err := d.checkLoaded(); err != nil {
		return nil, errors.Join(err, lock.Release())
	}
	return lock, nil
}

// checkLoaded refuses a datapath that was unloaded, even if another one was loaded since: its maps are orphans.
func (d *Datapath) checkLoaded() error {
	if inode, err := d.dir.inode(); err != nil || inode != d.loaded {
		return fmt.Errorf("%w: it was unloaded meanwhile", ErrNotLoaded)
	}
	return nil
}

// TakeTurn limits how many processes react to a burst of events: one works, and one waits for it. It
// returns nil to any other, because the waiting one will read the host's state later. The error wraps
// ErrNotLoaded if the datapath is not loaded.
func TakeTurn(ctx context.Context) (*flock.Lock, error) {
	d, err := openConfig()
	if err != nil {
		return nil, err
	}
	next, err := tryLock(ctx, d.dir.maps())
	if next == nil || err != nil {
		return nil, err
	}
	turn, err := flock.Acquire(ctx, d.dir.progs(), flock.Exclusive)
	return turn, errors.Join(err, next.Release())
}

// TryDropReader takes the lock of the one process that may read drop_events. It returns nil if another
// process has it.
func (d *Datapath) TryDropReader(ctx context.Context) (*flock.Lock, error) {
	return tryLock(ctx, d.dir.links())
}

// tryLock returns nil if somebody has the lock.
func tryLock(ctx context.Context, path string) (*flock.Lock, error) {
	atOnce, cancel := context.WithCancel(ctx)
	cancel()
	lock, err := flock.Acquire(atOnce, path, flock.Exclusive)
	if errors.Is(err, flock.ErrBusy) {
		return nil, nil
	}
	return lock, err
}

// Dir returns the directory of the pins, for messages.
func (d *Datapath) Dir() string { return string(d.dir) }

// OpenMaps returns the open maps by their names in bpf/maps.h.
func (d *Datapath) OpenMaps() map[string]*ebpf.Map {
	open := map[string]*ebpf.Map{}
	for name, m := range d.registered() {
		if *m != nil {
			open[name] = *m
		}
	}
	return open
}

// openConfig opens the datapath without its maps.
func openConfig() (*Datapath, error) {
	if err := checkRoot(); err != nil {
		return nil, err
	}
	dir, err := netnsDir()
	if err != nil {
		return nil, err
	}
	d := &Datapath{dir: dir}
	if d.loaded, err = dir.inode(); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: no %s", ErrNotLoaded, dir)
	} else if err != nil {
		return nil, explain(&os.PathError{Op: "stat", Path: string(dir), Err: err})
	}
	return d, d.readConfig()
}

// readConfig reads the configuration, which an upgrade replaces. Another version's
// may be longer or shorter: missing members are zero.
func (d *Datapath) readConfig() error {
	if err := d.checkLoaded(); err != nil {
		return err
	}
	path := d.dir.mapPin(configPin)
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		// A kernel that refuses BPF does not say whether the pin exists.
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
	return fmt.Errorf("%w: its map layout is %d, this binary needs %d: use the version that loaded it, "+
		"or remove the containers, run `ebpfnetctl unload --yes`, and start them again", ErrIncompatible, d.Config.Abi, ABI)
}

// openMaps opens the maps of the registry that the function selects; after an error it closes all of them.
func (d *Datapath) openMaps(wanted func(mapTraits) bool) (*Datapath, error) {
	for name, m := range d.registered() {
		if !wanted(registry[name]) {
			continue
		}
		if err := d.openMap(name, m); err != nil {
			d.Close()
			return nil, err
		}
	}
	return d, nil
}

func (d *Datapath) openMap(name string, m **ebpf.Map) (err error) {
	*m, err = ebpf.LoadPinnedMap(d.dir.mapPin(name), nil)
	if err != nil && !(d.isForeign() && errors.Is(err, fs.ErrNotExist)) {
		return fmt.Errorf("open %s: %w", d.dir.mapPin(name), err)
	}
	return nil
}

// OpenOnDemand opens maps that few changes need, unless they are open. If the datapath
// has another map layout, it opens nothing.
func (d *Datapath) OpenOnDemand(wanted ...string) error {
	for name, m := range d.registered() {
		if *m != nil || d.isForeign() || !slices.Contains(wanted, name) {
			continue
		}
		if err := d.openMap(name, m); err != nil {
			return err
		}
	}
	return nil
}

// Causes that a caller can act on. Every error of this package with such a cause
// wraps it; the others wrap that of the failed system call and name its object.
var (
	// ErrNotLoaded: the datapath is not loaded in this network namespace. An ADD will load it.
	ErrNotLoaded = errors.New("the datapath is not loaded")
	// ErrIncompatible: the layout of the loaded maps is not this binary's.
	ErrIncompatible = errors.New("the loaded datapath belongs to another version of ebpfnet")
	// ErrNotSupported: this host cannot run the datapath. The message names what is missing.
	ErrNotSupported = errors.New("this host cannot run ebpfnet")
)
