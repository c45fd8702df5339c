package prog

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// The tests' datapath has a small flow_table, because they read all of it.
const (
	flowWays    = len(bpf.FlowBucket{}.Id)
	flowBuckets = 64
)

// flowTable reads and writes flow_table as the programs do. No program may run meanwhile.
type flowTable struct{ buckets, table *ebpf.Map }

func (h *host) flows() flowTable {
	return flowTable{h.programs.Maps[bpf.MapFlowBuckets], h.programs.Maps[bpf.MapFlowTable]}
}

// placeOf returns the bucket of a key, and its id.
func (f flowTable) placeOf(key bpf.FlowKey) (bucket, id uint32) {
	const golden = 0x9e3779b1

	hash := hashSecret(key.Remote, key.Local, uint64(key.RemotePort)<<32|uint64(key.LocalPort)<<16|uint64(key.Protocol))
	return uint32(hash & 0xffffffff * uint64(f.buckets.MaxEntries()) >> 32), (uint32(hash>>32) + uint32(key.Kind)*golden) | 1
}

// find returns the bucket of a key, and the way that has the key or is free. The way is flowWays if there is none.
func (f flowTable) find(key bpf.FlowKey) (index uint32, bucket bpf.FlowBucket, way int, found bool, err error) {
	index, id := f.placeOf(key)
	if err := f.buckets.Lookup(index, &bucket); err != nil {
		return 0, bucket, 0, false, err
	}
	way = flowWays
	for i, other := range bucket.Id {
		if other == id {
			return index, bucket, i, true, nil
		}
		if other == 0 {
			way = i
		}
	}
	return index, bucket, way, false, nil
}

// Put adds or replaces a flow.
func (f flowTable) Put(key bpf.FlowKey, value bpf.Flow) error {
	index, bucket, way, _, err := f.find(key)
	if err != nil {
		return err
	}
	if way == flowWays {
		return errors.New("the bucket of the flow is full")
	}
	_, bucket.Id[way] = f.placeOf(key)
	place := index*uint32(flowWays) + uint32(way)
	return errors.Join(f.table.Put(place, bpf.FlowEntry{Key: key, Flow: value}), f.buckets.Put(index, bucket))
}

// Lookup reads a flow.
func (f flowTable) Lookup(key bpf.FlowKey, value *bpf.Flow) error {
	index, _, way, found, err := f.find(key)
	if err == nil && !found {
		err = fmt.Errorf("flow %+v: %w", key, ebpf.ErrKeyNotExist)
	}
	var entry bpf.FlowEntry
	if err == nil {
		err = f.table.Lookup(index*uint32(flowWays)+uint32(way), &entry)
	}
	*value = entry.Flow
	return err
}

// Delete removes a flow.
func (f flowTable) Delete(key bpf.FlowKey) error {
	index, bucket, way, found, err := f.find(key)
	if err == nil && !found {
		err = fmt.Errorf("flow %+v: %w", key, ebpf.ErrKeyNotExist)
	}
	if err != nil {
		return err
	}
	bucket.Id[way] = 0
	return f.buckets.Put(index, bucket)
}

// all reads all flows but those of kind FlowOffload.
func (f flowTable) all() (map[bpf.FlowKey]bpf.Flow, error) {
	return f.ofKind(func(kind bpf.FlowKind) bool { return kind != bpf.FlowOffload })
}

// offloads reads the flows of kind FlowOffload, which are of a protocol.
func (f flowTable) offloads(protocol uint8) (map[bpf.FlowKey]bpf.Offload, error) {
	all, err := f.ofKind(func(kind bpf.FlowKind) bool { return kind == bpf.FlowOffload })
	offloads := map[bpf.FlowKey]bpf.Offload{}
	for key, value := range all {
		if key.Protocol == protocol {
			offloads[key] = *(*bpf.Offload)(unsafe.Pointer(&value))
		}
	}
	return offloads, err
}

func (f flowTable) ofKind(wanted func(bpf.FlowKind) bool) (map[bpf.FlowKey]bpf.Flow, error) {
	buckets, err := allOf[bpf.FlowBucket](f.buckets)
	if err != nil {
		return nil, err
	}
	entries, err := allOf[bpf.FlowEntry](f.table)
	all := map[bpf.FlowKey]bpf.Flow{}
	for i, bucket := range buckets {
		for way, id := range bucket.Id {
			if entry := entries[i*flowWays+way]; id != 0 && wanted(entry.Key.Kind) {
				all[entry.Key] = entry.Flow
			}
		}
	}
	return all, err
}

// clear removes all flows.
func (f flowTable) clear() error {
	keys, values := make([]uint32, f.buckets.MaxEntries()), make([]bpf.FlowBucket, f.buckets.MaxEntries())
	for i := range keys {
		keys[i] = uint32(i)
	}
	_, err := f.buckets.BatchUpdate(keys, values, nil)
	return err
}

// allOf reads an array.
func allOf[V any](m *ebpf.Map) ([]V, error) {
	keys, values := make([]uint32, m.MaxEntries()), make([]V, m.MaxEntries())
	var cursor ebpf.MapBatchCursor
	_, err := m.BatchLookup(&cursor, keys, values, nil)
	if errors.Is(err, ebpf.ErrKeyNotExist) { // the end
		err = nil
	}
	return values, err
}
