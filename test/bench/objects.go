package main

import (
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/loader"
)

// object is a map in the kernel.
type object struct {
	Name    string `json:"name"`
	Bytes   uint64 `json:"bytes"`
	Entries uint32 `json:"entries,omitempty"`
}

// objects are the maps of a node's datapath, with the kernel memory that they use.
type objects struct {
	Maps []object `json:"maps"`
}

func (o *objects) bytes() (all uint64) {
	for _, m := range o.Maps {
		all += m.Bytes
	}
	return all
}

// objects reads the pinned maps of the node's datapath.
func (s *setup) objects() (*objects, error) {
	var dir string
	err := s.topology.Node.Do(func() (err error) {
		dir, err = loader.NetnsName()
		return err
	})
	if err != nil {
		return nil, err
	}
	dir = filepath.Join(loader.Root, dir, "maps")
	all := new(objects)
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		m, err := mapObject(path)
		if err != nil {
			return fmt.Errorf("read the size of %s: %w", path, err)
		}
		all.Maps = append(all.Maps, m)
		return nil
	})
	if err == nil && len(all.Maps) == 0 {
		err = fmt.Errorf("no pins in %s", dir)
	}
	return all, err
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
