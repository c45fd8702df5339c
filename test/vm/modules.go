package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// bootModules are loaded from the initramfs, before the guest sees the host's files.
var bootModules = []string{"virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay"}

// defaultModules are loaded before the program starts, because modprobe starts slowly. The kernel loads
// others on demand.
const defaultModules = "veth,sch_ingress,cls_bpf,act_bpf,sch_fq,bridge,br_netfilter,bonding,8021q,tun,nf_tables"

// moduleIndex knows the modules of one kernel.
type moduleIndex struct {
	files   map[string]string   // name to path, relative to the modules' directory
	needs   map[string][]string // path to paths of the modules to load before
	builtin map[string]bool     // names of built-in modules
}

// readModuleIndex reads modules.dep and modules.builtin in dir, a kernel's /lib/modules/RELEASE.
func readModuleIndex(dir string) (*moduleIndex, error) {
	index := &moduleIndex{
		files:   make(map[string]string),
		needs:   make(map[string][]string),
		builtin: make(map[string]bool),
	}
	for file, parse := range map[string]func(io.Reader) error{
		"modules.dep":     index.parseDep,
		"modules.builtin": index.parseBuiltin,
	} {
		f, err := os.Open(filepath.Join(dir, file))
		if err != nil {
			return nil, err
		}
		err = errors.Join(parse(f), f.Close())
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", f.Name(), err)
		}
	}
	return index, nil
}

// parseDep reads lines such as "kernel/a.ko: kernel/b.ko kernel/c.ko": a needs b and c, and c must be
// loaded first.
func (x *moduleIndex) parseDep(r io.Reader) error {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		path, needs, ok := strings.Cut(lines.Text(), ":")
		if !ok {
			return fmt.Errorf("line without a colon: %q", lines.Text())
		}
		x.files[moduleName(path)] = path
		x.needs[path] = strings.Fields(needs)
		slices.Reverse(x.needs[path])
	}
	return lines.Err()
}

func (x *moduleIndex) parseBuiltin(r io.Reader) error {
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		x.builtin[moduleName(lines.Text())] = true
	}
	return lines.Err()
}

// known returns the names that the kernel has.
func (x *moduleIndex) known(names []string) (known []string) {
	for _, name := range names {
		if x.files[name] != "" || x.builtin[name] {
			known = append(known, name)
		}
	}
	return known
}

// closure returns the paths of the named modules and of all that they need, each once, in the order of
// loading. It omits built-in modules.
func (x *moduleIndex) closure(names []string) ([]string, error) {
	var order []string
	add := func(path string) {
		if !slices.Contains(order, path) {
			order = append(order, path)
		}
	}
	for _, name := range names {
		name = strings.ReplaceAll(name, "-", "_")
		path, ok := x.files[name]
		if !ok && x.builtin[name] {
			continue
		}
		if !ok {
			return nil, fmt.Errorf("the kernel has no module %s", name)
		}
		for _, need := range x.needs[path] {
			add(need)
		}
		add(path)
	}
	return order, nil
}

// moduleName turns kernel/net/sched/act-x.ko.xz into act_x.
func moduleName(path string) string {
	name, _, _ := strings.Cut(filepath.Base(path), ".")
	return strings.ReplaceAll(name, "-", "_")
}
