package loader

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// Copy is a copy of the programs, for test runs that leave nothing behind. It shares the maps that the programs only
// read, and has empty maps of its own in place of the others: package maps fills them.
type Copy struct {
	Datapath // the copy's maps and configuration, for functions that read a datapath

	All  map[string]*ebpf.Map // the copy's maps
	Live map[string]*ebpf.Map // the maps of the loaded programs

	spec     *ebpf.CollectionSpec
	programs map[string]*ebpf.Program
}

// copied are the programs that a copy has: those at devices with Ethernet do for all.
var copied = []string{bpf.ProgFromContainer, bpf.ProgToContainer, bpf.ProgFromUplink, bpf.ProgToUplink, bpf.ProgToLoopback}

// shared are the maps that the programs only read.
var shared = []string{
	bpf.MapCluster, bpf.MapDevices, bpf.MapEndpoints, bpf.MapGeneration, bpf.MapHostPorts, bpf.MapNodes, bpf.MapPeerClasses,
	bpf.MapPolicies, bpf.MapPolicyBlocks, bpf.MapPolicyRules, bpf.MapPrefixes, bpf.MapRouteRules, bpf.MapRuleSets,
	bpf.MapUplinks,
}

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
	c := &Copy{Datapath: *d, programs: map[string]*ebpf.Program{}}
	if c.spec, err = programs.Spec(); err != nil {
		return nil, err
	}
	if err := c.spec.Variables[bpf.VarConfig].Set(d.Config); err != nil {
		return nil, err
	}
	names := maps.Clone(c.spec.Maps)
	delete(names, rodata)
	if c.Live, err = d.openPinned(names); err != nil {
		return nil, err
	}
	if err = c.create(); err == nil {
		err = c.load()
	}
	if err != nil {
		return nil, errors.Join(explain(err), c.Close())
	}
	return c, nil
}

// create creates the copy's own maps, as large as the live ones. They evict no entry, and allocate none ahead.
func (c *Copy) create() error {
	kept := map[string]*ebpf.Map{}
	for name, live := range c.Live {
		spec := c.spec.Maps[name]
		spec.MaxEntries = live.MaxEntries()
		if slices.Contains(shared, name) {
			kept[name] = live
		} else if spec.Type == ebpf.LRUHash || spec.Type == ebpf.Hash {
			spec.Type, spec.Flags = ebpf.Hash, unix.BPF_F_NO_PREALLOC
		}
	}
	raiseMemlock()
	collection, err := loadPart(c.spec, nil, kept)
	if err != nil {
		return err
	}
	c.All = collection.Maps
	fields := reflect.ValueOf(&c.Maps).Elem()
	for i := range fields.NumField() {
		if m := c.All[fields.Type().Field(i).Tag.Get("ebpf")]; m != nil {
			fields.Field(i).Set(reflect.ValueOf(m))
		}
	}
	return nil
}

// load loads the programs at once: that takes a second or more, in which what the maps had already would age.
func (c *Copy) load() error {
	programs, errs := make([]*ebpf.Program, len(copied)), make([]error, len(copied))
	var wait sync.WaitGroup
	for i, name := range copied {
		wait.Go(func() {
			part, err := loadPart(c.spec, map[string]*ebpf.ProgramSpec{name: c.spec.Programs[name]}, c.All)
			if err != nil {
				errs[i] = fmt.Errorf("load a copy of %s: %w", name, err)
				return
			}
			defer part.Close()
			programs[i] = part.DetachProgram(name)
		})
	}
	wait.Wait()
	for i, name := range copied {
		c.programs[name] = programs[i]
	}
	return errors.Join(errs...)
}

// Close removes the copy.
func (c *Copy) Close() error {
	var errs []error
	for _, program := range c.programs {
		errs = append(errs, program.Close())
	}
	for _, open := range []map[string]*ebpf.Map{c.All, c.Live} {
		for _, m := range open {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// Run runs the copy of a program on a packet: see TestRun. It also returns the tag that the packet has afterwards. The programs of
// devices without Ethernet have no copy.
func (c *Copy) Run(name string, p Packet) (verdict, tag uint32, frame []byte, err error) {
	return TestRunTagged(c.programs[name], p)
}
