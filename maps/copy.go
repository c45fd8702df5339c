package maps

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// FillCopy gives a copy of the programs the entries that packets from or to some addresses may need, in the place of
// those that it has. Those of the forwarding cache, and notes, are left to CopyTuple. Nothing that is in the copy
// makes a program send a clone of a packet that opens or continues a connection.
func FillCopy(c *loader.Copy, addresses ...netip.Addr) error {
	wanted := map[bpf.Addr]bool{}
	for _, addr := range addresses {
		wanted[wireAddr(addr)] = true
	}
	for name, m := range c.All {
		if c.IsPrivate(name) && m.Type() == ebpf.Hash {
			if err := empty(m); err != nil {
				return fmt.Errorf("empty a copy of %s: %w", name, err)
			}
		}
	}
	isFlow := func(k bpf.FlowKey, v bpf.Flow) bool { return wanted[k.Remote] || wanted[k.Local] || wanted[v.NatAddr] }
	isOffload := func(k bpf.OffloadKey, _ bpf.Offload) bool { return wanted[k.Addr[0]] || wanted[k.Addr[1]] }
	now, err := nowTicks()
	return errors.Join(err,
		copyEntries(c, bpf.MapFlows, isFlow, nil),
		// Conntrack was told of TCP just now: no program tells it by a clone.
		copyEntries(c, bpf.MapOffloadTCP, isOffload, func(o *bpf.Offload) { o.CtSeen = now }),
		copyEntries(c, bpf.MapOffloadUDP, isOffload, nil),
		copyEntries(c, bpf.MapMasqSources, func(bpf.MasqSourcesKey, bpf.MasqSources) bool { return true }, nil),
		copyArray[bpf.MasqProbes](c, bpf.MapMasqProbes), copyArray[bpf.MasqProbes](c, bpf.MapBackupProbes),
		c.All[bpf.MapMovedFlows].Put(uint32(0), uint32(math.MaxUint32)),
		copyBackup(c, wanted),
		clearCounts(c.All[bpf.MapDropTotals]),
	)
}

// empty deletes one entry after the other: there are few, of which some are large.
func empty(m *ebpf.Map) error {
	for {
		key, err := m.NextKeyBytes(nil)
		if key == nil || err != nil {
			return err
		}
		if err := m.Delete(key); err != nil {
			return err
		}
	}
}

// copyEntries copies those of a map that are wanted, each after a change.
func copyEntries[K, V any](c *loader.Copy, name string, wanted func(K, V) bool, change func(*V)) error {
	for entry, err := range entries[K, V](c.Live[name]) {
		if err != nil {
			return err
		}
		if !wanted(entry.key, entry.value) {
			continue
		}
		if change != nil {
			change(&entry.value)
		}
		if err := c.All[name].Put(&entry.key, &entry.value); err != nil {
			return fmt.Errorf("copy an entry of %s: %w", name, explainFull(c.All[name], err))
		}
	}
	return nil
}

func copyArray[V any](c *loader.Copy, name string) error {
	live := c.Live[name]
	keys, values := make([]uint32, live.MaxEntries()), make([]V, live.MaxEntries())
	err := batches(live, keys, values, nil, func(n int) bool { return n < len(keys) })
	if err == nil {
		_, err = c.All[name].BatchUpdate(keys, values, nil)
	}
	if err != nil {
		return fmt.Errorf("copy %s: %w", name, err)
	}
	return nil
}

// copyBackup copies entries of flows_backup to the copy's single bucket: those that the copy of flows lacks, because
// programs look for no others. There, their hashes are the same.
func copyBackup(c *loader.Copy, wanted map[bpf.Addr]bool) error {
	places, found, err := evicted(c, wanted)
	if err != nil {
		return err
	}
	var ids bpf.BackupIDs
	for way := range uint32(len(ids.Id)) {
		var slot bpf.FlowBackup
		if int(way) < len(found) {
			var of bpf.BackupIDs
			if err := c.Live[bpf.MapBackupIDs].Lookup(places[way]/uint32(len(of.Id)), &of); err != nil {
				return fmt.Errorf("read backup_ids: %w", err)
			}
			slot, ids.Id[way] = found[way], of.Id[places[way]%uint32(len(of.Id))]
		}
		if err := c.All[bpf.MapFlowsBackup].Put(way, &slot); err != nil {
			return fmt.Errorf("copy an entry of flows_backup: %w", err)
		}
	}
	return c.All[bpf.MapBackupIDs].Put(uint32(0), &ids)
}

// evicted returns wanted entries of the live flows_backup that the copy of flows lacks, as many as the copy has room
// for, and their places.
func evicted(c *loader.Copy, wanted map[bpf.Addr]bool) (places []uint32, found []bpf.FlowBackup, err error) {
	live := c.Live[bpf.MapFlowsBackup]
	used := c.BackupBuckets * uint32(len(bpf.BackupIDs{}.Id))
	size := min(batchSize, used)
	keys, values := make([]uint32, size), make([]bpf.FlowBackup, size)
	locked := &ebpf.BatchOptions{ElemFlags: uint64(ebpf.LookupLock)} // no entry is half written
	var errFlows error
	err = batches(live, keys, values, locked, func(n int) bool {
		for i, slot := range values[:n] {
			if slot.Used == 0 || !(wanted[slot.Key.Remote] || wanted[slot.Key.Local] || wanted[slot.Flow.NatAddr]) {
				continue
			}
			var flow bpf.Flow
			switch err := c.All[bpf.MapFlows].Lookup(&slot.Key, &flow); {
			case errors.Is(err, ebpf.ErrKeyNotExist):
				places, found = append(places, keys[i]), append(found, slot)
			case err != nil:
				errFlows = fmt.Errorf("read a copy of flows: %w", err)
			}
		}
		return errFlows == nil && len(found) < len(bpf.BackupIDs{}.Id) && keys[n-1]+1 < used
	})
	return places, found, errors.Join(err, errFlows)
}

func clearCounts(totals *ebpf.Map) error {
	for reason := range totals.MaxEntries() {
		if err := totals.Put(reason, make([]bpf.DropCount, ebpf.MustPossibleCPU())); err != nil {
			return fmt.Errorf("clear a copy of drop_totals: %w", err)
		}
	}
	return nil
}

// CopyTuple gives a copy of the programs what forwarding cache and notes have of the packets of a tuple. The copy's
// CPUs all have the latest decision of any.
func CopyTuple(c *loader.Copy, tuple bpf.FwdKey) error {
	reverse := tuple
	reverse.Src, reverse.Dst, reverse.Sport, reverse.Dport = tuple.Dst, tuple.Src, tuple.Dport, tuple.Sport
	return errors.Join(copyDecision(c, tuple), copyNote(c, tuple), copyNote(c, reverse))
}

func copyNote(c *loader.Copy, tuple bpf.FwdKey) error {
	place, word := tupleID(c.Config, tuple)>>1%c.Live[bpf.MapTupleNotes].MaxEntries(), uint64(0)
	if err := c.Live[bpf.MapTupleNotes].Lookup(place, &word); err != nil {
		return fmt.Errorf("read a note: %w", err)
	}
	return c.All[bpf.MapTupleNotes].Put(place, word)
}

func copyDecision(c *loader.Copy, tuple bpf.FwdKey) error {
	id := tupleID(c.Config, tuple)
	bucket := id >> 1 % c.Live[bpf.MapFwdWays].MaxEntries()
	var ways []bpf.FwdWays
	if err := c.Live[bpf.MapFwdWays].Lookup(bucket, &ways); err != nil {
		return fmt.Errorf("read fwd_ways: %w", err)
	}
	places := uint32(len(ways[0].Id))
	found, err := latestDecision(c, tuple, id, bucket, ways)
	if err != nil {
		return err
	}
	way := bpf.FwdWays{}
	if found != nil {
		way.Id[0] = id
	} else {
		found = &bpf.FwdEntry{}
	}
	for i := range places {
		if err := c.All[bpf.MapFwdCache].Put(bucket*places+i, slices.Repeat([]bpf.FwdEntry{*found}, len(ways))); err != nil {
			return fmt.Errorf("copy an entry of fwd_cache: %w", err)
		}
	}
	return c.All[bpf.MapFwdWays].Put(bucket, slices.Repeat([]bpf.FwdWays{way}, len(ways)))
}

// latestDecision returns the entry of the CPU that has made the latest one for the tuple, or nil.
func latestDecision(c *loader.Copy, tuple bpf.FwdKey, id, bucket uint32, ways []bpf.FwdWays) (latest *bpf.FwdEntry, err error) {
	for i := range uint32(len(ways[0].Id)) {
		var entries []bpf.FwdEntry
		if err := c.Live[bpf.MapFwdCache].Lookup(bucket*uint32(len(ways[0].Id))+i, &entries); err != nil {
			return nil, fmt.Errorf("read fwd_cache: %w", err)
		}
		for cpu, e := range entries {
			if ways[cpu].Id[i] == id && e.Key == tuple && (latest == nil || int32(e.Updated-latest.Updated) > 0) {
				latest = &e
			}
		}
	}
	return latest, nil
}

// Decision returns the entry that the forwarding cache of a copy has for a tuple, if any.
func Decision(c *loader.Copy, tuple bpf.FwdKey) (*bpf.FwdEntry, error) {
	id := tupleID(c.Config, tuple)
	bucket := id >> 1 % c.All[bpf.MapFwdWays].MaxEntries()
	var ways []bpf.FwdWays
	if err := c.All[bpf.MapFwdWays].Lookup(bucket, &ways); err != nil {
		return nil, fmt.Errorf("read a copy of fwd_ways: %w", err)
	}
	copied := *c
	copied.Live = c.All
	return latestDecision(&copied, tuple, id, bucket, ways)
}

// Tuple returns the key of a packet that a device has received: fwd_key in bpf/abi.h.
func Tuple(protocol Protocol, src, dst netip.AddrPort, device int, echoReply bool) bpf.FwdKey {
	flag := map[bool]uint8{true: 1}
	return bpf.FwdKey{
		Src: wireAddr(src.Addr()), Dst: wireAddr(dst.Addr()), Sport: src.Port(), Dport: dst.Port(), Ifindex: uint32(device),
		Protocol: uint8(protocol), Ipv6: flag[src.Addr().Is6()], HasPorts: 1, EchoReply: flag[echoReply],
	}
}

// TupleTag returns the tag of a packet that goes through the host's stack: tag_of in bpf/tag.h.
func TupleTag(config bpf.HostConfig, tuple bpf.FwdKey) uint32 {
	const tagTuple, hashBits = 0x8000, 0x2000 - 1
	return tagTuple | hashTuple(config, tuple)&hashBits
}

// RoutedTag returns the tag of the packet that the copy's from_uplink has tagged last, for to_container, or 0.
func RoutedTag(c *loader.Copy, tuple bpf.FwdKey) (uint32, error) {
	const tagRouted = 0x4000
	tag := TupleTag(c.Config, tuple) | tagRouted
	var entry bpf.Routed
	if err := c.All[bpf.MapRouted].Lookup(tag%c.All[bpf.MapRouted].MaxEntries(), &entry); err != nil {
		return 0, fmt.Errorf("read a copy of routed: %w", err)
	}
	if entry.Tag&^0x2000 != tag {
		return 0, nil
	}
	return entry.Tag, nil
}

// tupleID is tuple_id in bpf/tag.h.
func tupleID(config bpf.HostConfig, tuple bpf.FwdKey) uint32 { return hashTuple(config, tuple) | 1 }

// hashTuple is hash_tuple in bpf/tag.h.
func hashTuple(config bpf.HostConfig, tuple bpf.FwdKey) uint32 {
	src, dst := words(tuple.Src), words(tuple.Dst)
	hash := hashMix(uint32(config.Secret[0])^uint32(tuple.Protocol), uint32(tuple.Sport)<<16|uint32(tuple.Dport))
	hash = hashMix(hashMix(hash, src[3]), dst[3])
	if tuple.Ipv6 != 0 {
		for i := range 3 {
			hash = hashMix(hashMix(hash, src[i]), dst[i])
		}
	}
	return hash
}

// hashMix is hash_mix in bpf/hash.h.
func hashMix(hash, word uint32) uint32 {
	const golden = 0x9e3779b1
	hash = (hash ^ word) * golden
	return hash ^ hash>>15
}

// words returns an address as the programs load it.
func words(addr bpf.Addr) (w [4]uint32) {
	for i := range w {
		w[i] = binary.NativeEndian.Uint32(addr.Bytes[4*i:])
	}
	return w
}
