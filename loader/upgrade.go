package loader

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// An upgrade replaces programs and leaves the maps alone, so pods and flows stay.
// The new programs are pinned beside the old ones; then one rename puts the new
// configuration, which names them, in the place of the old one. From then on
// whoever attaches takes the new programs, and the upgrade goes through what is
// attached already. Old and new programs work on the same maps, so a packet is
// served by either at any time. One that is killed leaves a second directory of
// programs, by which the next ADD, of whatever version, sees that there is
// something to finish.

// Upgraded tells what an upgrade has done.
type Upgraded struct {
	FromBuild    uint64 `json:"fromBuild"`
	FromRevision uint32 `json:"fromRevision"`
	ToBuild      uint64 `json:"toBuild"`
	ToRevision   uint32 `json:"toRevision"`
	Programs     int    `json:"programs"` // that were put on devices
}

// Upgrade puts this binary's programs in the place of those that are loaded,
// whichever are newer: so it is also the way back. The error wraps ErrNotLoaded
// where nothing is loaded, and ErrIncompatible where the maps do not fit.
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

// renew upgrades programs that are older than those of options, and finishes an
// upgrade that was killed. Most often there is nothing to do, which costs a look
// at one directory.
func (d *Datapath) renew(ctx context.Context, options Options) error {
	own := options.programs()
	others, err := d.otherPrograms()
	if err != nil || len(others) == 0 && !d.isOlder(own) {
		return err
	}
	lock, err := d.Lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Release()

	if err := d.readConfig(); err != nil { // another may have been here meanwhile
		return err
	}
	if d.isOlder(own) {
		_, err = d.upgrade(own)
	} else {
		_, err = d.settle()
	}
	return err
}

// isOlder is also true of other programs of the same revision, as one has them who
// works on them.
func (d *Datapath) isOlder(own Programs) bool {
	return d.Config.Build != own.Build && d.Config.Revision <= own.Revision
}

// upgrade takes the steps. The caller holds the lock.
func (d *Datapath) upgrade(own Programs) (Upgraded, error) {
	done := Upgraded{
		FromBuild: d.Config.Build, FromRevision: d.Config.Revision,
		ToBuild: own.Build, ToRevision: own.Revision,
	}
	if d.Config.Build != own.Build {
		if err := d.takeOver(own); err != nil {
			return done, err
		}
	}
	var err error
	done.Programs, err = d.settle()
	return done, err
}

// takeOver makes other programs those in use. After an error the old ones are still in use, though
// what they count may be looked for in a new map, until the next upgrade.
func (d *Datapath) takeOver(own Programs) error {
	if err := d.removeOtherPrograms(); err != nil { // of one that was killed
		return err
	}
	collection, fresh, err := d.loadBeside(own)
	if err != nil {
		return err
	}
	defer collection.Close()

	err = pinPrograms(collection, d.dir.progsOf(own.Build))
	if err == nil {
		err = d.pinMaps(collection, fresh, own.Build)
	}
	if err == nil {
		err = d.pinOver(collection.Maps[rodata], own.Build, configPin) // decides
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(d.dir.progsOf(own.Build)))
	}
	return d.readConfig()
}

// loadBeside loads programs that work on the maps that are pinned, and returns the
// names of those maps that are new. Maps that only one of two versions knows are no
// obstacle: those of the new one are made, and those of the old one stay for the
// way back.
func (d *Datapath) loadBeside(own Programs) (collection *ebpf.Collection, fresh []string, err error) {
	var counters *ebpf.Map // of which the new programs need more
	spec, err := own.specWith(d.Config)
	if err != nil {
		return nil, nil, err
	}
	kept := map[string]*ebpf.Map{}
	for name, wanted := range spec.Maps {
		if name == rodata {
			continue
		}
		pinned, err := ebpf.LoadPinnedMap(d.dir.mapPin(name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			fresh = append(fresh, name)
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("open %s: %w", d.dir.mapPin(name), err)
		}
		defer pinned.Close() // the collection has its own

		if isScratch(wanted) {
			fresh = append(fresh, name)
			continue
		}
		if name == bpf.MapDropTotals && pinned.MaxEntries() < wanted.MaxEntries {
			fresh, counters = append(fresh, name), pinned
			continue
		}
		kept[name] = pinned
		wanted.MaxEntries = pinned.MaxEntries()
		if err := wanted.Compatible(pinned); err != nil {
			return nil, nil, fmt.Errorf("%w: map %s: %w", ErrIncompatible, name, err)
		}
	}
	if collection, err = newCollection(spec, kept); err != nil {
		return nil, nil, err
	}
	if counters != nil {
		if err := copyCounters(counters, collection.Maps[bpf.MapDropTotals]); err != nil {
			collection.Close()
			return nil, nil, err
		}
	}
	return collection, fresh, nil
}

// isScratch recognizes what a program needs while it has one packet. Nothing in it
// outlives the packet, so each build has its own, of whatever layout.
func isScratch(spec *ebpf.MapSpec) bool {
	return spec.Type == ebpf.PerCPUArray && spec.MaxEntries == 1
}

// copyCounters takes the counts over where programs know more reasons for drops.
func copyCounters(from, to *ebpf.Map) error {
	for reason := range from.MaxEntries() {
		var counts []bpf.DropCount
		if err := from.Lookup(reason, &counts); err != nil {
			return fmt.Errorf("read the counters: %w", err)
		}
		if err := to.Put(reason, counts); err != nil {
			return fmt.Errorf("copy the counters: %w", err)
		}
	}
	return nil
}

func (d *Datapath) pinMaps(collection *ebpf.Collection, names []string, build uint64) error {
	for _, name := range names {
		if err := d.pinOver(collection.Maps[name], build, name); err != nil {
			return err
		}
	}
	return nil
}

// pinOver pins a map in the place of an older one of the name, if there is one, at
// once: by way of the programs' directory, where a leftover is removed with it.
func (d *Datapath) pinOver(m *ebpf.Map, build uint64, name string) error {
	temp := d.dir.progPin(build, "map-"+name)
	if err := m.Pin(temp); err != nil {
		return fmt.Errorf("pin map %s: %w", name, err)
	}
	if err := os.Rename(temp, d.dir.mapPin(name)); err != nil {
		return fmt.Errorf("put a new map in the place of %s: %w", name, err)
	}
	return nil
}

// settle puts the programs in use on every device that has any of ours, takes off
// those that this version has no place for, and removes the others. It returns how
// many it has put. The caller holds the lock.
func (d *Datapath) settle() (put int, err error) {
	placed, err := d.placed()
	if err != nil {
		return 0, err
	}
	wanted := wantedTargets(placed)
	for _, t := range wanted {
		err := d.attach(t)
		if errors.Is(err, unix.ENODEV) {
			continue // went meanwhile
		}
		if err != nil {
			return put, err
		}
		put++
	}
	for _, t := range placed {
		if hasPlace(wanted, t) {
			continue
		}
		if err := d.detachAll([]target{t}); err != nil {
			return put, err
		}
	}
	return put, d.removeOtherPrograms()
}

// wantedTargets returns where this version has programs on the devices on which
// any version has some.
func wantedTargets(placed []target) []target {
	var wanted []target
	for _, t := range placed {
		for _, other := range siblings(t) {
			if !hasPlace(wanted, other) {
				wanted = append(wanted, other)
			}
		}
	}
	return wanted
}

func hasPlace(targets []target, t target) bool {
	for _, other := range targets {
		if other.ifindex == t.ifindex && other.direction == t.direction {
			return true
		}
	}
	return false
}

// otherPrograms returns the directories of programs that are not in use.
func (d *Datapath) otherPrograms() ([]string, error) {
	entries, err := os.ReadDir(d.dir.progs())
	if err != nil {
		return nil, fmt.Errorf("list the pinned programs: %w", err)
	}
	var others []string
	for _, entry := range entries {
		if path := filepath.Join(d.dir.progs(), entry.Name()); path != d.dir.progsOf(d.Config.Build) {
			others = append(others, path)
		}
	}
	return others, nil
}

func (d *Datapath) removeOtherPrograms() error {
	others, err := d.otherPrograms()
	if err != nil {
		return err
	}
	for _, path := range others {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove programs that are not in use: %w", err)
		}
	}
	return nil
}
