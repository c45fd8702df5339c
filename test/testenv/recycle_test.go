package testenv

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/loader"
)

// TestRecycle leaves a datapath with something in every map to another node, which gets it empty, and only if it
// would load the same.
func TestRecycle(t *testing.T) {
	options := loader.Options{MaxFlows: 1024}
	old, next := New(t, "old"), New(t, "next")
	t.Cleanup(func() {
		if err := errors.Join(os.RemoveAll(loader.Root), removeRecycled()); err != nil {
			t.Error(err)
		}
	})
	err := old.Do(func() error {
		datapath, err := loader.Open(Context(t), options)
		if err != nil {
			return err
		}
		datapath.Close()
		return eachMap(datapath.Dir(), fill)
	})
	Must(t, err)

	Recycle(t, old)
	Preload(t, next, loader.Options{MaxFlows: 2048})
	if _, err := dirOf(next); !errors.Is(err, loader.ErrNotLoaded) {
		t.Errorf("datapath of another size: got %v, want it to be left alone", err)
	}
	if _, err := dirOf(old); !errors.Is(err, loader.ErrNotLoaded) {
		t.Errorf("former node: got %v, want no datapath", err)
	}
	Preload(t, next, options)
	dir, err := dirOf(next)
	Must(t, err)
	err = eachMap(dir, func(m *ebpf.Map) error {
		value, err := m.LookupBytes(someKey(m))
		if got := bytes.Trim(value, "\x00"); len(got) > 0 {
			t.Errorf("map %s: got %x, want it empty", m, got)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// dirOf returns the directory of a node's datapath.
func dirOf(node *Namespace) (dir string, err error) {
	err = node.WithDatapath(func(datapath *loader.Datapath) error {
		dir = datapath.Dir()
		return nil
	})
	return dir, err
}

// fill puts a value of ones into a map, on each CPU.
func fill(m *ebpf.Map) error {
	ones := bytes.Repeat([]byte{1}, int(m.ValueSize()))
	if m.Type() != ebpf.PerCPUArray {
		return m.Put(someKey(m), ones)
	}
	values := make([][]byte, ebpf.MustPossibleCPU())
	for cpu := range values {
		values[cpu] = ones
	}
	return m.Put(someKey(m), values)
}

// eachMap calls do with the pinned maps that user space can write.
func eachMap(dir string, do func(*ebpf.Map) error) error {
	pins, err := filepath.Glob(filepath.Join(dir, "maps", "*"))
	if len(pins) == 0 {
		return errors.Join(err, errors.New(dir+" has no maps"))
	}
	for _, pin := range pins {
		m, loadErr := ebpf.LoadPinnedMap(pin, nil)
		if loadErr != nil {
			return loadErr
		}
		if filepath.Base(pin) != "config" && m.Type() != ebpf.RingBuf {
			err = errors.Join(err, do(m))
		}
		m.Close()
	}
	return err
}

// someKey returns the last index of an array, or the same key of a hash or trie each time.
func someKey(m *ebpf.Map) []byte {
	key := make([]byte, m.KeySize())
	binary.NativeEndian.PutUint32(key, 8) // bits of a prefix
	if m.Type() == ebpf.Array || m.Type() == ebpf.PerCPUArray {
		binary.NativeEndian.PutUint32(key, m.MaxEntries()-1)
	}
	return key
}
