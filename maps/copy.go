package maps

import (
	"errors"
	"fmt"
	"unsafe"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// FillCopy copies the entries that packets may need to an empty copy of the programs. Entries of the forwarding
// cache are left out: without one, a program decides in full. No entry of the copy makes a program send a clone of a
// packet that opens or continues a connection.
func FillCopy(c *loader.Copy) error {
	now, err := nowTicks()
	upToDate := func(e *bpf.FlowEntry) { // so that no program clones a packet for conntrack, or leaves its translation to the stack
		o := (*bpf.Offload)(unsafe.Pointer(&e.Flow))
		if e.Key.Kind == bpf.FlowOffload && (Protocol(e.Key.Protocol) == TCP || o.Translated != 0) {
			o.CtSeen, o.CtAcked = now, [2]uint32{o.CtAck[1], o.CtAck[0]}
		}
	}
	return errors.Join(err,
		copyArray(c, bpf.MapFlowBuckets, func(*bpf.FlowBucket) {}),
		copyArray(c, bpf.MapFlowTable, upToDate),
		copyEntries[bpf.FlowKey, bpf.AdmittedFlow](c, bpf.MapAdmittedFlows),
		copyEntries[bpf.MasqSourcesKey, bpf.MasqSources](c, bpf.MapMasqSources),
		copyArray(c, bpf.MapMovedFlows, func(*bpf.Moved) {}),
		copyArray(c, bpf.MapPortMarks, func(*uint64) {}),
		copyArray(c, bpf.MapTupleNotes, func(*uint64) {}),
	)
}

func copyEntries[K, V any](c *loader.Copy, name string) error {
	for entry, err := range entries[K, V](c.Live[name]) {
		if err != nil {
			return err
		}
		if err := c.All[name].Put(&entry.key, &entry.value); err != nil {
			return fmt.Errorf("copy an entry of %s: %w", name, explainFull(c.All[name], err))
		}
	}
	return nil
}

// copyArray copies all entries of an array. edit may change them.
func copyArray[V any](c *loader.Copy, name string, edit func(*V)) error {
	live := c.Live[name]
	size := min(batchSize, int(live.MaxEntries()))
	keys, values := make([]uint32, size), make([]V, size)
	var errPut error
	err := batches(live, keys, values, func(n int) bool {
		for i := range values[:n] {
			edit(&values[i])
		}
		_, errPut = c.All[name].BatchUpdate(keys[:n], values[:n], nil)
		return errPut == nil
	})
	if err := errors.Join(err, errPut); err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	return nil
}
