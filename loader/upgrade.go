package loader

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// An upgrade replaces the programs and keeps the maps, so pods and flows keep
// working. It pins the new programs beside the old ones. Then one rename replaces
// the old configuration by a new one, which names the new programs. From then on
// every attach takes the new programs, and the upgrade reattaches what is attached
// already. Old and new programs share the maps, so either can serve a packet at any
// time. A killed upgrade leaves a second directory of programs; the next ADD, of
// whatever version, finds that and finishes the work.

// BuildID is a hash of the programs' code. In text and in JSON it is 16 hex digits, since
// many JSON readers round numbers above 2^53.
type BuildID uint64

// String returns the 16 hex digits.
func (b BuildID) String() string { return fmt.Sprintf("%016x", uint64(b)) }

// MarshalText implements [encoding.TextMarshaler].
func (b BuildID) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// Upgraded reports what an upgrade did.
type Upgraded struct {
	FromBuild    BuildID `json:"fromBuild"`
	FromRevision uint32  `json:"fromRevision"`
	ToBuild      BuildID `json:"toBuild"`
	ToRevision   uint32  `json:"toRevision"`
	Programs     int     `json:"programs"` // attached to devices
}

// Upgrade replaces the loaded programs by this binary's, whichever are newer, so it
// also goes back to an older version. The error wraps ErrNotLoaded if nothing is
// loaded, and ErrIncompatible if the maps do not fit.
func Upgrade(ctx context.Context, options Options) (Upgraded, error) {
	d, err := openConfig()
	if err != nil {
		return Upgraded{}, err
	}
	lock, err := d.Lock(ctx)
	if err != nil {
		return Upgraded{}, err
	}
	defer lock.Release()

	if err := d.readConfig(); err != nil {
		return Upgraded{}, err
	}
	if err := d.checkABI(); err != nil {
		return Upgraded{}, err
	}
	return d.upgrade(options.programs())
}

// upgradeIfOlder upgrades programs older than those of options, and finishes an
// upgrade that was killed. Usually there is nothing to do, which costs reading one
// directory.
func (d *Datapath) upgradeIfOlder(ctx context.Context, options Options) error {
	programs := options.programs()
	unused, err := d.unusedPrograms()
	if err != nil || len(unused) == 0 && !d.isOlder(programs) {
		return err
	}
	lock, err := d.Lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Release()

	if err := d.readConfig(); err != nil { // another process may have upgraded meanwhile
		return err
	}
	if d.isOlder(programs) {
		_, err = d.upgrade(programs)
	} else {
		_, err = d.reattach()
	}
	return err
}

// isOlder reports whether the loaded programs have a lower revision, or the same one and another build, so
// that a developer sees each change at once.
func (d *Datapath) isOlder(programs Programs) bool {
	return d.Config.Build != programs.Build && d.Config.Revision <= programs.Revision
}

// upgrade replaces the loaded programs. The caller holds the lock.
func (d *Datapath) upgrade(programs Programs) (Upgraded, error) {
	done := Upgraded{
		FromBuild: BuildID(d.Config.Build), FromRevision: d.Config.Revision,
		ToBuild: BuildID(programs.Build), ToRevision: programs.Revision,
	}
	if d.Config.Build != programs.Build {
		if err := d.switchPrograms(programs); err != nil {
			return done, err
		}
	}
	var err error
	done.Programs, err = d.reattach()
	return done, err
}

// switchPrograms loads and pins programs and makes them those in use. After an error
// the old ones are still in use, but new maps may already have replaced old ones: the
// drop totals of the old programs then stay invisible until the next upgrade.
func (d *Datapath) switchPrograms(programs Programs) error {
	if err := d.removeUnusedPrograms(); err != nil { // of a killed upgrade
		return err
	}
	collection, newMaps, err := d.loadOnPinnedMaps(programs)
	if err != nil {
		return err
	}
	defer collection.Close()

	err = pinPrograms(collection, d.dir.progsOf(programs.Build))
	if err == nil {
		err = d.pinMaps(collection, newMaps, programs.Build)
	}
	if err == nil {
		err = d.replacePin(collection.Maps[rodata], programs.Build, configPin) // decides
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(d.dir.progsOf(programs.Build)))
	}
	return d.readConfig()
}

// loadOnPinnedMaps loads programs that use the pinned maps, and returns the names of
// the maps that it had to create. A map that only the new programs know is created; one
// that only the old programs know stays, in case they return.
func (d *Datapath) loadOnPinnedMaps(programs Programs) (collection *ebpf.Collection, created []string, err error) {
	spec, err := programs.Spec()
	if err != nil {
		return nil, nil, err
	}
	shared := maps.Clone(spec.Maps)
	delete(shared, rodata)
	pinned, err := d.openPinned(shared)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		for _, m := range pinned {
			m.Close() // the collection has its own
		}
	}()
	kept := map[string]*ebpf.Map{}
	for name, wanted := range shared {
		m := pinned[name]
		if m == nil || isScratch(wanted) || isTooSmall(name, m, wanted) {
			created = append(created, name)
			continue
		}
		wanted.MaxEntries = m.MaxEntries()
		if err := wanted.Compatible(m); err != nil {
			return nil, nil, fmt.Errorf("%w: map %s: %w", ErrIncompatible, name, err)
		}
		kept[name] = m
	}
	if err := programs.configure(spec, d.Config); err != nil { // with the secret of before
		return nil, nil, err
	}
	if collection, err = newCollection(spec, kept); err != nil {
		return nil, nil, err
	}
	if old := pinned[bpf.MapDropTotals]; old != nil && slices.Contains(created, bpf.MapDropTotals) {
		if err := copyDropTotals(old, collection.Maps[bpf.MapDropTotals]); err != nil {
			collection.Close()
			return nil, nil, err
		}
	}
	return collection, created, nil
}

// openPinned opens those of the maps that are pinned. The caller must close them.
func (d *Datapath) openPinned(specs map[string]*ebpf.MapSpec) (map[string]*ebpf.Map, error) {
	pinned := map[string]*ebpf.Map{}
	for name := range specs {
		m, err := ebpf.LoadPinnedMap(d.dir.mapPin(name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			for _, m := range pinned {
				m.Close()
			}
			return nil, fmt.Errorf("open %s: %w", d.dir.mapPin(name), err)
		}
		pinned[name] = m
	}
	return pinned, nil
}

// isScratch reports whether a map is memory that a program uses for one packet. Nothing in it
// outlives the packet, so each build has its own, with its own layout.
func isScratch(spec *ebpf.MapSpec) bool {
	return spec.Type == ebpf.PerCPUArray && spec.MaxEntries == 1
}

// isTooSmall reports whether a pinned map has the drop totals of programs that know fewer reasons. The
// sizes of other maps depend on the host.
func isTooSmall(name string, pinned *ebpf.Map, wanted *ebpf.MapSpec) bool {
	return name == bpf.MapDropTotals && pinned.MaxEntries() < wanted.MaxEntries
}

func copyDropTotals(from, to *ebpf.Map) error {
	for reason := range from.MaxEntries() {
		var counts []bpf.DropCount
		if err := from.Lookup(reason, &counts); err != nil {
			return fmt.Errorf("read drop total %d: %w", reason, err)
		}
		if err := to.Put(reason, counts); err != nil {
			return fmt.Errorf("copy drop total %d: %w", reason, err)
		}
	}
	return nil
}

func (d *Datapath) pinMaps(collection *ebpf.Collection, names []string, build uint64) error {
	for _, name := range names {
		if err := d.replacePin(collection.Maps[name], build, name); err != nil {
			return err
		}
	}
	return nil
}

// tempMap begins the names of temporary pins of maps.
const tempMap = "map-"

// replacePin pins a map under a name, and replaces an older map's pin atomically. The
// temporary pin is in the programs' directory, with which a leftover is removed.
func (d *Datapath) replacePin(m *ebpf.Map, build uint64, name string) error {
	temp := d.dir.progPin(build, tempMap+name)
	if err := m.Pin(temp); err != nil {
		return fmt.Errorf("pin map %s: %w", name, err)
	}
	if err := os.Rename(temp, d.dir.mapPin(name)); err != nil {
		return fmt.Errorf("replace the pin of map %s: %w", name, err)
	}
	return nil
}

// reattach attaches the programs in use to every device that has programs of any
// version, detaches those from hooks that this version does not use, and removes
// programs that are not in use. It returns the number of attached programs. The
// caller holds the lock.
func (d *Datapath) reattach() (attached int, err error) {
	present, err := d.attachedTargets()
	if err != nil {
		return 0, err
	}
	desired := desiredTargets(present)
	for _, t := range desired {
		err := d.attach(t)
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENOLINK) {
			continue // the device was deleted meanwhile
		}
		if err != nil {
			return attached, err
		}
		attached++
	}
	for _, t := range present {
		isKept := func(w target) bool { return w.samePlace(t) && d.attacherOf(w) == d.attacherOf(t) }
		if slices.ContainsFunc(desired, isKept) {
			continue
		}
		if err := d.detachAll([]target{t}); err != nil {
			return attached, err
		}
	}
	return attached, d.removeUnusedPrograms()
}

// desiredTargets returns this version's targets on the devices of present, which any
// version may have attached.
func desiredTargets(present []target) []target {
	var desired []target
	for _, t := range present {
		if t.ifindex == 0 {
			continue // a link that has outlived its device
		}
		for _, onDevice := range targetsOnDevice(t) {
			if !slices.ContainsFunc(desired, onDevice.samePlace) {
				desired = append(desired, onDevice)
			}
		}
	}
	return desired
}

// unusedPrograms returns the directories of programs that are not in use.
func (d *Datapath) unusedPrograms() ([]string, error) {
	entries, err := os.ReadDir(d.dir.progs())
	if err != nil {
		return nil, fmt.Errorf("list the pinned programs: %w", err)
	}
	var unused []string
	for _, entry := range entries {
		if path := filepath.Join(d.dir.progs(), entry.Name()); path != d.dir.progsOf(d.Config.Build) {
			unused = append(unused, path)
		}
	}
	return unused, nil
}

func (d *Datapath) removeUnusedPrograms() error {
	unused, err := d.unusedPrograms()
	if err != nil {
		return err
	}
	for _, path := range unused {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove unused programs: %w", err)
		}
	}
	return nil
}
