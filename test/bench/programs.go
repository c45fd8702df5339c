package main

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
)

// object is a program or map in the kernel.
type object struct {
	Name  string `json:"name"`
	Bytes uint64 `json:"bytes"`
	// Entries is the size of a map.
	Entries uint32 `json:"entries,omitempty"`
}

// objects are the programs and maps of a node's datapath, with the kernel memory that they use.
type objects struct {
	Programs []object `json:"programs"`
	Maps     []object `json:"maps"`
}

func (o *objects) bytes() (programs, maps uint64) {
	for _, p := range o.Programs {
		programs += p.Bytes
	}
	for _, m := range o.Maps {
		maps += m.Bytes
	}
	return programs, maps
}

// pins lists the pins below a directory of the node's datapath: maps or progs.
func (s *setup) pins(kind string) (paths []string, err error) {
	var dir string
	err = s.topology.Node.Do(func() error {
		dir, err = loader.NetnsName()
		return err
	})
	if err != nil {
		return nil, err
	}
	dir = filepath.Join(loader.Root, dir, kind)
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			paths = append(paths, path)
		}
		return err
	})
	if err == nil && len(paths) == 0 {
		err = fmt.Errorf("no pins in %s", dir)
	}
	return paths, err
}

func (s *setup) objects() (*objects, error) {
	all := new(objects)
	paths, err := s.pins("maps")
	if err != nil {
		return nil, err
	}
	for _, path := range paths {
		m, err := mapObject(path)
		if err != nil {
			return nil, fmt.Errorf("read the size of %s: %w", path, err)
		}
		all.Maps = append(all.Maps, m)
	}
	programs, err := s.openPrograms()
	defer closePrograms(programs)
	if err != nil {
		return nil, err
	}
	for name, program := range programs {
		info, err := program.Info()
		if err != nil {
			return nil, fmt.Errorf("read the size of %s: %w", name, err)
		}
		bytes, _ := info.Memlock()
		all.Programs = append(all.Programs, object{Name: name, Bytes: bytes})
	}
	slices.SortFunc(all.Programs, func(a, b object) int { return int(b.Bytes) - int(a.Bytes) })
	slices.SortFunc(all.Maps, func(a, b object) int { return int(b.Bytes) - int(a.Bytes) })
	return all, nil
}

// find returns the map with that name, or none.
func (o *objects) find(name string) object {
	for _, m := range o.Maps {
		if m.Name == name {
			return m
		}
	}
	return object{}
}

func mapObject(path string) (object, error) {
	m, err := ebpf.LoadPinnedMap(path, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return object{}, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return object{}, err
	}
	bytes, _ := info.Memlock()
	return object{Name: filepath.Base(path), Bytes: bytes, Entries: m.MaxEntries()}, nil
}

func (s *setup) openPrograms() (map[string]*ebpf.Program, error) {
	paths, err := s.pins("progs")
	if err != nil {
		return nil, err
	}
	programs := make(map[string]*ebpf.Program)
	for _, path := range paths {
		program, err := ebpf.LoadPinnedProgram(path, nil)
		if err != nil {
			return programs, fmt.Errorf("open %s: %w", path, err)
		}
		programs[filepath.Base(path)] = program
	}
	return programs, nil
}

func closePrograms(programs map[string]*ebpf.Program) {
	for _, program := range programs {
		program.Close()
	}
}

// programCost is the run time of a program under one workload.
type programCost struct {
	Setup    string  `json:"setup"`
	Program  string  `json:"program"`
	Path     string  `json:"path"`
	Family   string  `json:"family"`
	Workload string  `json:"workload"`
	Nanos    float64 `json:"ns"` // per run
	Runs     uint64  `json:"runs"`
}

// costedWorkloads are the workloads for which run times of programs are measured.
var costedWorkloads = []string{"udp-packets", "tcp-rr", "tcp-crr"}

// programCosts lets the kernel measure the run time of programs. This slows each run down a little,
// so nothing else is measured at the same time.
func (s *setup) programCosts(traffic []traffic, slice time.Duration) ([]programCost, error) {
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	if err != nil {
		return nil, fmt.Errorf("enable statistics of BPF programs: %w", err)
	}
	defer stats.Close()
	programs, err := s.openPrograms()
	defer closePrograms(programs)
	if err != nil {
		return nil, err
	}
	var all []programCost
	for _, t := range traffic {
		if !slices.Contains(costedWorkloads, t.workload.name) {
			continue
		}
		before, errBefore := runsOf(programs)
		_, err := t.workload.run(t.ends, slice)
		after, errAfter := runsOf(programs)
		if err := errors.Join(errBefore, err, errAfter); err != nil {
			return nil, fmt.Errorf("%s, %s, %s: %w", t.path.name, t.family.Name, t.workload.name, err)
		}
		for name := range programs {
			runs := after[name].RunCount - before[name].RunCount
			if runs == 0 {
				continue
			}
			all = append(all, programCost{
				Setup: s.name(), Program: name, Path: t.path.name, Family: t.family.Name, Workload: t.workload.name,
				Nanos: float64(after[name].Runtime-before[name].Runtime) / float64(runs), Runs: runs,
			})
		}
	}
	return all, nil
}

func runsOf(programs map[string]*ebpf.Program) (map[string]*ebpf.ProgramStats, error) {
	all := make(map[string]*ebpf.ProgramStats)
	for name, program := range programs {
		stats, err := program.Stats()
		if err != nil {
			return nil, fmt.Errorf("read statistics of %s: %w", name, err)
		}
		all[name] = stats
	}
	return all, nil
}
