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
	"github.com/ebpfnet/ebpfnet/loader/flock"
)

// Programs are the programs of one version of ebpfnet.
type Programs struct {
	ABI      uint32 // version of the map layout
	Revision uint32 // higher in newer programs
	Build    uint64 // hash of the code
	Spec     func() (*ebpf.CollectionSpec, error)
}

// Embedded returns the programs embedded in this binary.
func Embedded() Programs {
	return Programs{ABI: ABI, Revision: bpf.Revision, Build: bpf.Build, Spec: bpf.LoadDatapath}
}

func (o Options) programs() Programs {
	if o.Programs != nil {
		return *o.Programs
	}
	return Embedded()
}

// load loads programs and maps and publishes their pins, unless another process has
// done so meanwhile.
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

	if _, err := os.Stat(dir.mapPin(configPin)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := errors.Join(removeLeftovers(dir), os.RemoveAll(string(dir))); err != nil {
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
	if err := errors.Join(ensureBPFFS(), checkBPFFS()); err != nil {
		return "", err
	}
	if err := os.Mkdir(Root, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", fmt.Errorf("create the directory of the pins: %w", err)
	}
	if err := checkRoot(); err != nil { // another user may have been faster
		return "", err
	}
	return netnsDir()
}

// removeLeftovers removes the temporary directories of processes that were killed
// while they loaded or unloaded. The caller holds the lock.
func removeLeftovers(dir stateDir) error {
	leftovers, err := filepath.Glob(tempPrefix(dir) + "-*")
	if err != nil {
		return err
	}
	for _, path := range leftovers {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove the pins of a killed process: %w", err)
		}
	}
	return nil
}

// pinAll loads the datapath and pins its maps and programs below dir.
func pinAll(dir stateDir, options Options) error {
	spec, err := Spec(options)
	if err != nil {
		return err
	}
	collection, err := newCollection(spec, nil)
	if err != nil {
		return err
	}
	defer collection.Close()

	for _, path := range []string{string(dir), dir.maps(), dir.progs(), dir.links()} {
		if err := os.Mkdir(path, 0o700); err != nil {
			return fmt.Errorf("create a directory of pins: %w", err)
		}
	}
	for name, m := range collection.Maps {
		if name == rodata {
			name = configPin
		}
		if err := m.Pin(dir.mapPin(name)); err != nil {
			return fmt.Errorf("pin map %s: %w", name, err)
		}
	}
	return pinPrograms(collection, dir.progsOf(options.programs().Build))
}

func pinPrograms(collection *ebpf.Collection, dir string) error {
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("create a directory of pins: %w", err)
	}
	for name, program := range collection.Programs {
		if err := program.Pin(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("pin program %s: %w", name, err)
		}
	}
	return nil
}

// newCollection loads programs, and creates their maps except for those given. The verifier takes most of the
// time, so programs are loaded in parallel, one per CPU.
func newCollection(spec *ebpf.CollectionSpec, maps map[string]*ebpf.Map) (*ebpf.Collection, error) {
	raiseMemlock()
	collection, err := loadPart(spec, nil, maps)
	if errors.Is(err, unix.ENOMEM) {
		return nil, fmt.Errorf("%w: %w (no memory for maps of %d flows: lower maxFlows, or raise the memory limit of the runtime's cgroup)",
			ErrNotSupported, err, spec.Maps[bpf.MapFlowTable].MaxEntries)
	}
	if err != nil {
		return nil, explain(err)
	}
	programs, err := loadPrograms(spec, collection.Maps)
	if err != nil {
		collection.Close()
		return nil, explain(err)
	}
	collection.Programs = programs
	return collection, nil
}

func loadPrograms(spec *ebpf.CollectionSpec, maps map[string]*ebpf.Map) (map[string]*ebpf.Program, error) {
	type result struct {
		name    string
		program *ebpf.Program
		err     error
	}
	results := make(chan result)
	for name, program := range spec.Programs {
		go func() {
			part, err := loadPart(spec, map[string]*ebpf.ProgramSpec{name: program}, maps)
			if err != nil {
				results <- result{err: err}
				return
			}
			defer part.Close()
			results <- result{name: name, program: part.DetachProgram(name)}
		}()
	}
	programs := map[string]*ebpf.Program{}
	var errs []error
	for range spec.Programs {
		r := <-results
		if r.err != nil {
			errs = append(errs, r.err)
			continue
		}
		programs[r.name] = r.program
	}
	if err := errors.Join(errs...); err != nil {
		for _, program := range programs {
			program.Close()
		}
		return nil, err
	}
	return programs, nil
}

// loadPart loads the programs, and creates all maps of spec except for those given.
func loadPart(spec *ebpf.CollectionSpec, programs map[string]*ebpf.ProgramSpec, maps map[string]*ebpf.Map) (*ebpf.Collection, error) {
	spec = spec.Copy()
	spec.Programs = programs
	types, ok := kernelTypes()
	if !ok {
		types, spec.Programs = spec.Types, withoutKernelCalls(programs) // for code that the verifier removes
	}
	return ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: maps, Programs: ebpf.ProgramOptions{KernelTypes: types},
	})
}

// explain adds the requirements to an error with which the kernel refuses BPF.
func explain(err error) error {
	if errors.Is(err, os.ErrPermission) || errors.Is(err, ebpf.ErrNotSupported) {
		return fmt.Errorf("%w: %w (needs Linux 5.10 or newer, CAP_BPF and CAP_NET_ADMIN, no lockdown, and before 5.11 no limit on locked memory)", ErrNotSupported, err)
	}
	return err
}

// raiseMemlock is for kernels before 5.11, where maps count against the limit on
// locked memory. Its error is ignored, because loading fails if the limit was too low.
// The library's rlimit package would create a map for a probe at the start of every
// process, even if it loads nothing.
func raiseMemlock() {
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	_ = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited)
}

// rodata is the map of the section that holds the configuration.
const rodata = ".rodata"

// Spec returns the datapath, configured for this host.
func Spec(options Options) (*ebpf.CollectionSpec, error) {
	config, err := chooseConfig(options)
	if err != nil {
		return nil, err
	}
	spec, err := options.programs().Spec()
	if err != nil {
		return nil, err
	}
	if options.MaxFlows == 0 {
		options.MaxFlows = flowsFor(memory())
	}
	for name, traits := range registry {
		if traits.flowsPerEntry > 0 {
			spec.Maps[name].MaxEntries = traits.size(options.MaxFlows)
		}
	}
	return spec, options.programs().configure(spec, config)
}

// configure sets the configuration of the programs, which has their build and revision. The maps of spec
// have their final sizes.
func (p Programs) configure(spec *ebpf.CollectionSpec, config bpf.HostConfig) error {
	config.Abi, config.Build, config.Revision = p.ABI, p.Build, p.Revision
	config.FlowBuckets = spec.Maps[bpf.MapFlowBuckets].MaxEntries
	spec.Maps[bpf.MapFlowTable].MaxEntries = config.FlowBuckets * flowWays
	config.SeesHooks = 0
	if _, ok := kernelTypes(); ok {
		config.SeesHooks = 1
	}
	jiffy, err := jiffy()
	if err != nil {
		return err
	}
	config.CacheJiffies = cacheJiffies(jiffy)
	if err := spec.Variables[bpf.VarConfig].Set(config); err != nil {
		return fmt.Errorf("set the datapath's configuration: %w", err)
	}
	return nil
}
