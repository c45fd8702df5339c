package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// FillCopy copies to an empty copy of the programs the entries that packets from or to some addresses may need.
// Entries of the forwarding cache are left out: without one, a program decides in full. No entry of the copy makes a
// program send a clone of a packet that opens or continues a connection.
func FillCopy(c *loader.Copy, addresses ...netip.Addr) error {
	of := map[bpf.Addr]bool{}
	for _, addr := range addresses {
		of[wireAddr(addr)] = true
	}
	now, err := nowTicks()
	isOffload := func(k bpf.OffloadKey) bool { return of[k.Addr[0]] || of[k.Addr[1]] }
	return errors.Join(err,
		copyArray[bpf.FlowBucket](c, bpf.MapFlowBuckets, 0),
		copyArray[bpf.FlowEntry](c, bpf.MapFlowTable, 0),
		copyEntries(c, bpf.MapAdmittedFlows, func(bpf.FlowKey, *bpf.AdmittedFlow) bool { return true }),
		copyEntries(c, bpf.MapOffloadTCP, func(k bpf.OffloadKey, v *bpf.Offload) bool {
			v.CtSeen, v.CtAcked = now, [2]uint32{v.CtAck[1], v.CtAck[0]} // so that no program clones a packet for conntrack
			return isOffload(k)
		}),
		copyEntries(c, bpf.MapOffloadUDP, func(k bpf.OffloadKey, _ *bpf.Offload) bool { return isOffload(k) }),
		copyEntries(c, bpf.MapMasqSources, func(bpf.MasqSourcesKey, *bpf.MasqSources) bool { return true }),
		copyArray[bpf.Moved](c, bpf.MapMovedFlows, 0),
		copyArray[uint64](c, bpf.MapTupleNotes, 0),
	)
}

// copyEntries copies those entries of a map for which take returns true. It may change the value.
func copyEntries[K, V any](c *loader.Copy, name string, take func(K, *V) bool) error {
	for entry, err := range entries[K, V](c.Live[name]) {
		if err != nil {
			return err
		}
		if !take(entry.key, &entry.value) {
			continue
		}
		if err := c.All[name].Put(&entry.key, &entry.value); err != nil {
			return fmt.Errorf("copy an entry of %s: %w", name, explainFull(c.All[name], err))
		}
	}
	return nil
}

// copyArray copies all entries of an array.
func copyArray[V any](c *loader.Copy, name string, flags ebpf.MapLookupFlags) error {
	live := c.Live[name]
	size := min(batchSize, int(live.MaxEntries()))
	keys, values := make([]uint32, size), make([]V, size)
	var errPut error
	err := batches(live, keys, values, &ebpf.BatchOptions{ElemFlags: uint64(flags)}, func(n int) bool {
		_, errPut = c.All[name].BatchUpdate(keys[:n], values[:n], nil)
		return errPut == nil
	})
	if err := errors.Join(err, errPut); err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	return nil
}
