package loader

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Copy is a copy of the programs, for test runs that leave nothing behind. It shares the maps that the programs only
// read, and has others of its own, without entries: package maps fills them.
type Copy struct {
	Datapath // the copy's maps and configuration, for what reads a datapath

	All  map[string]*ebpf.Map // the copy's maps
	Live map[string]*ebpf.Map // those of the datapath that it is a copy of
	// BackupBuckets are those of the live flows_backup; the copy has one.
	BackupBuckets uint32

	spec     *ebpf.CollectionSpec
	programs map[string]*ebpf.Program
	pinned   func(program string) (*ebpf.Program, error) // nil: nothing is pinned
}

// shared are the maps that the programs only read.
var shared = []string{
	bpf.MapCluster, bpf.MapDevices, bpf.MapEndpoints, bpf.MapGatewayRoutes, bpf.MapGeneration, bpf.MapHostPorts, bpf.MapNodes,
	bpf.MapNonMasqCIDRs,
	bpf.MapPortNumbers, bpf.MapPortSrcRanges, bpf.MapRouteRules, bpf.MapUplinks,
}

// connections are the maps of which a copy may need each entry: one container may have them all.
var connections = []string{bpf.MapFlows, bpf.MapOffloadTCP, bpf.MapOffloadUDP}

// maxWritten is more than the number of entries that the copy of another hash map gets.
const maxWritten = 1024

// OpenCopy opens a copy of the loaded programs, which must be those of this binary. The caller must Close it.
func OpenCopy() (*Copy, error) {
	d, err := openConfig()
	if err != nil {
		return nil, err
	}
	if err := d.checkABI(); err != nil {
		return nil, err
	}
	programs := Embedded()
	if d.Config.Build != programs.Build {
		return nil, fmt.Errorf("%w: the loaded programs are build %s, revision %d, and this binary has %s, revision %d: "+
			"use the version that loaded them, or `ebpfnetctl upgrade`",
			ErrIncompatible, BuildID(d.Config.Build), d.Config.Revision, BuildID(programs.Build), programs.Revision)
	}
	spec, err := programs.Spec()
	if err != nil {
		return nil, err
	}
	if err := spec.Variables[bpf.VarConfig].Set(d.Config); err != nil {
		return nil, err
	}
	pins := maps.Clone(spec.Maps)
	delete(pins, rodata)
	live, err := d.openPinned(pins)
	if err != nil {
		return nil, err
	}
	c, err := NewCopy(spec, live)
	if err != nil {
		return nil, errors.Join(err, closeAll(live))
	}
	c.dir = d.dir
	c.pinned = func(program string) (*ebpf.Program, error) {
		return ebpf.LoadPinnedProgram(d.dir.progPin(d.Config.Build, program), nil)
	}
	return c, nil
}

// NewCopy returns a copy of programs that are loaded with live maps. It closes them with its own.
func NewCopy(spec *ebpf.CollectionSpec, live map[string]*ebpf.Map) (*Copy, error) {
	c := &Copy{spec: spec.Copy(), Live: live, All: map[string]*ebpf.Map{}, programs: map[string]*ebpf.Program{}}
	if err := spec.Variables[bpf.VarConfig].Get(&c.Config); err != nil {
		return nil, err
	}
	kept := map[string]*ebpf.Map{}
	for name, wanted := range c.spec.Maps {
		switch m := live[name]; {
		case slices.Contains(shared, name) && m == nil: // an older version's maps
			return nil, fmt.Errorf("%w: there is no map %s: `ebpfnetctl upgrade` creates it", ErrIncompatible, name)
		case slices.Contains(shared, name):
			wanted.MaxEntries = m.MaxEntries()
			kept[name] = m
		case wanted.Type == ebpf.LRUHash, wanted.Type == ebpf.Hash: // nothing is evicted, and nothing preallocated
			wanted.Type, wanted.Flags, wanted.MaxEntries = ebpf.Hash, unix.BPF_F_NO_PREALLOC, min(wanted.MaxEntries, maxWritten)
			if slices.Contains(connections, name) && m != nil {
				wanted.MaxEntries = m.MaxEntries()
			}
		}
	}
	c.spec.Maps[bpf.MapFlowsBackup].MaxEntries, c.spec.Maps[bpf.MapBackupIDs].MaxEntries = backupWays, 1
	c.spec.Maps[bpf.MapMovedFlows].MaxEntries = 1 // without an element of its own, each flow may have moved
	c.BackupBuckets, c.Config.BackupBuckets = c.Config.BackupBuckets, 1
	if err := c.spec.Variables[bpf.VarConfig].Set(c.Config); err != nil {
		return nil, err
	}
	raiseMemlock()
	collection, err := loadPart(c.spec, nil, kept)
	if err != nil {
		return nil, explain(err)
	}
	c.All = collection.Maps
	c.assign()
	return c, nil
}

// assign gives the maps to functions that read a datapath.
func (c *Copy) assign() {
	all := reflect.ValueOf(&c.Maps).Elem()
	for i := range all.NumField() {
		if m := c.All[all.Type().Field(i).Tag.Get("ebpf")]; m != nil {
			all.Field(i).Set(reflect.ValueOf(m))
		}
	}
}

// Close removes the copy.
func (c *Copy) Close() error {
	for _, program := range c.programs {
		program.Close()
	}
	return errors.Join(closeAll(c.All), closeAll(c.Live))
}

func closeAll(open map[string]*ebpf.Map) error {
	var errs []error
	for _, m := range open {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// IsPrivate returns whether a map is the copy's own, because programs write it.
func (c *Copy) IsPrivate(name string) bool { return name != rodata && !slices.Contains(shared, name) }

// Run runs the copy of a program on a packet: see TestRun.
func (c *Copy) Run(program string, p Packet) (verdict uint32, frame []byte, err error) {
	loaded, err := c.program(program)
	if err != nil {
		return 0, nil, err
	}
	return TestRun(loaded, p)
}

// program returns the copy of a program, which is loaded when it is needed first.
func (c *Copy) program(name string) (*ebpf.Program, error) {
	if program := c.programs[name]; program != nil {
		return program, nil
	}
	part, err := loadPart(c.spec, map[string]*ebpf.ProgramSpec{name: c.spec.Programs[name]}, c.All)
	if err != nil {
		return nil, explain(fmt.Errorf("load a copy of %s: %w", name, err))
	}
	defer part.Close()
	if err := c.checkSame(name, part.Programs[name]); err != nil {
		return nil, err
	}
	c.programs[name] = part.DetachProgram(name)
	return c.programs[name], nil
}

// checkSame requires that the kernel knows the pinned program by the same tag as its copy: the hash of its
// instructions.
func (c *Copy) checkSame(name string, copied *ebpf.Program) error {
	if c.pinned == nil {
		return nil
	}
	pinned, err := c.pinned(name)
	if err != nil {
		return fmt.Errorf("open the pinned %s: %w", name, err)
	}
	defer pinned.Close()
	a, errPinned := pinned.Info()
	b, errCopied := copied.Info()
	if err := errors.Join(errPinned, errCopied); err != nil {
		return err
	}
	if a.Tag != b.Tag {
		return fmt.Errorf("%w: the pinned %s has the tag %s, and its copy %s", ErrIncompatible, name, a.Tag, b.Tag)
	}
	return nil
}
