package admin

import (
	"fmt"
	"path/filepath"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// MapUse is a pinned map with its entries and its memory.
type MapUse struct {
	Name       string `json:"name"`
	Entries    *int   `json:"entries,omitempty"` // nil for arrays and queues
	MaxEntries uint32 `json:"maxEntries"`
	Bytes      uint64 `json:"bytes"` // as the kernel accounts them
}

// mapUses lists all pinned maps, so the sum of bytes is the memory of ebpfnet's maps. It counts entries of some maps, or
// of all if counted is nil, by walking over them.
func mapUses(datapath *loader.Datapath, counted []string) ([]MapUse, error) {
	entries, err := maps.Count(datapath, counted...)
	if err != nil {
		return nil, err
	}
	pins, err := filepath.Glob(filepath.Join(datapath.Dir(), "maps", "*"))
	if err != nil {
		return nil, err
	}
	var all []MapUse
	for _, pin := range pins {
		m, err := mapAt(pin)
		if err != nil {
			return nil, fmt.Errorf("inspect map %s: %w", pin, err)
		}
		if count, counted := entries[m.Name]; counted {
			m.Entries = &count
		}
		all = append(all, m)
	}
	return all, nil
}

func mapAt(pin string) (MapUse, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return MapUse{}, err
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		return MapUse{}, err
	}
	bytes, _ := info.Memlock()
	return MapUse{Name: filepath.Base(pin), MaxEntries: m.MaxEntries(), Bytes: bytes}, nil
}
