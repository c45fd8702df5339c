// Package maps is the typed view of the datapath's maps: what user space writes
// into them, reads from them, and removes.
//
//	map        key                              value                          written by   removed by
//	endpoints  container address                veth, MACs, masquerade or not  ADD          owner's DEL, GC
//	devices    host's end of a veth             owner, what it may send        ADD, set     owner's DEL, GC
//	ports      host address or any, port, prot. container address and port     ADD          owner's DEL, GC
//	exempts    set, prefix                      nothing                        ADD          DEL or GC of the last endpoint with that set
//	sources    set, prefix                      nothing                        ADD          DEL or GC of the last host port with that set
//	flows …    remote, local, protocol, kind    translated address and port    programs     kernel (LRU), GC
//	offload_…  both sides of a connection       whether it goes past the stack programs     kernel (LRU), end of TCP connections
//	ways       a packet's addresses and ports   where it goes, as what         programs     kernel (LRU)
//	uplinks    device                           its addresses                  ADD          ADD, when the device is gone
//	counters   reason of a drop                 packets and bytes per CPU      programs     never
//	drops      owner, reason                    packets and bytes              programs     owner's DEL, GC
//
// Whoever writes holds the datapath's lock; the only way to a Store that writes
// is With, which takes it. Endpoints and host ports are created, never overwritten, and
// removed by owner; an entry about a device is put anew where that has changed.
package maps

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// ErrTaken is wrapped by the error for a key that another owner's entry has.
var ErrTaken = errors.New("taken by another attachment")

// Store gives access to the maps of an open datapath.
type Store struct {
	dp *loader.Datapath
}

// With runs change while it holds the datapath's lock. ctx bounds the wait for
// the lock; the error then wraps flock.ErrBusy.
func With(ctx context.Context, dp *loader.Datapath, change func(*Store) error) error {
	lock, err := dp.Lock(ctx)
	if err != nil {
		return err
	}
	return errors.Join(change(&Store{dp}), lock.Release())
}

// CloseHostPorts removes an owner's host ports, so that nothing new comes in by
// them. With the last one the host's own traffic is left alone again.
func (s *Store) CloseHostPorts(owner loader.Owner) error {
	return s.closeHostPorts(map[loader.Owner]bool{owner: true})
}

func (s *Store) closeHostPorts(owners map[loader.Owner]bool) error {
	if err := removeOwned(s.dp.HostPorts, owners, ownerOf); err != nil {
		return err
	}
	if s.dp.HostPorts == nil {
		return nil
	}
	first, err := s.dp.HostPorts.NextKeyBytes(nil)
	if first == nil && err == nil {
		return s.dp.DetachLoopback()
	}
	return err
}

// Release removes what there is of an owner, host ports first, so that nothing new comes in.
// Flows stay: without their owner's endpoint they mean nothing to the programs, and to find
// them is a walk over all. It goes on after errors.
func (s *Store) Release(owner loader.Owner) error {
	return s.ReleaseAll(map[loader.Owner]bool{owner: true})
}

// ReleaseClosed is Release after CloseHostPorts.
func (s *Store) ReleaseClosed(owner loader.Owner) error {
	return s.release(map[loader.Owner]bool{owner: true})
}

// ReleaseAll is Release for many owners at the price of one walk over the maps.
func (s *Store) ReleaseAll(owners map[loader.Owner]bool) error {
	return errors.Join(s.closeHostPorts(owners), s.release(owners))
}

func (s *Store) release(owners map[loader.Owner]bool) error {
	return errors.Join(
		removeOwned(s.dp.Endpoints, owners, ownerOf),
		removeOwned(s.dp.Devices, owners, ownerOf),
		s.removeUnusedPrefixes(),
		removeOwned(s.dp.Drops, owners, ownerOfKey),
	)
}

// ownerHost is of the host's own connections: OWNER_HOST in bpf/abi.h.
const ownerHost loader.Owner = 0

// RemoveOrphans removes flows, and counters that a packet has made in the moment of a Release,
// whose owner has no device and no endpoint any more, in whatever network it was.
func (s *Store) RemoveOrphans() error {
	living := map[loader.Owner]bool{ownerHost: true}
	for _, m := range []*ebpf.Map{s.dp.Devices, s.dp.Endpoints} {
		for entry, err := range rawEntries(m) {
			if err != nil {
				return err
			}
			living[ownerOf(entry.key, entry.value)] = true
		}
	}
	orphan := func(owner loader.Owner) bool { return !living[owner] }
	return errors.Join(
		removeIf(s.dp.FlowsBackup, orphan, ownerOf),
		removeIf(s.dp.Flows, orphan, ownerOf),
		removeIf(s.dp.Drops, orphan, ownerOfKey),
	)
}

func removeOwned(m *ebpf.Map, owners map[loader.Owner]bool, ownerOf func(key, value []byte) loader.Owner) error {
	return removeIf(m, func(owner loader.Owner) bool { return owners[owner] }, ownerOf)
}

// removeIf removes the entries of some owners. It collects the keys before it deletes, since
// deleting disturbs a walk, and reads of the values what is the same in every version (bpf/abi.h).
func removeIf(m *ebpf.Map, remove func(loader.Owner) bool, ownerOf func(key, value []byte) loader.Owner) error {
	var keys [][]byte
	for entry, err := range rawEntries(m) {
		if err != nil {
			return err
		}
		if remove(ownerOf(entry.key, entry.value)) {
			keys = append(keys, slices.Clone(entry.key))
		}
	}
	var errs []error
	for _, key := range keys {
		if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete from %v: %w", m, err))
		}
	}
	return errors.Join(errs...)
}

func ownerOf(_, value []byte) loader.Owner { return loader.Owner(binary.NativeEndian.Uint64(value)) }

// ownerOfKey is for the counters of drops.
func ownerOfKey(key, _ []byte) loader.Owner { return loader.Owner(binary.NativeEndian.Uint64(key)) }

// networkOf is of a device, an endpoint or a host port.
func networkOf(value []byte) Network {
	const ownerSize = 8

	return Network(binary.NativeEndian.Uint32(value[ownerSize:]))
}

type entry[K, V any] struct {
	key   K
	value V
}

// batchSize is what one system call returns: large enough for every hash bucket.
const batchSize = 4096

// entries walks a hash map in batches (kernel 5.6); nil has none. Entries that come
// or go meanwhile may be missed. An error ends the walk.
func entries[K, V any](m *ebpf.Map) iter.Seq2[entry[K, V], error] {
	return func(yield func(entry[K, V], error) bool) {
		if m == nil {
			return
		}
		size := min(batchSize, int(m.MaxEntries()))
		keys, values := make([]K, size), make([]V, size)
		err := batches(m, keys, values, func(n int) bool {
			for i := range n {
				if !yield(entry[K, V]{keys[i], values[i]}, nil) {
					return false
				}
			}
			return true
		})
		if err != nil {
			yield(entry[K, V]{}, err)
		}
	}
}

// rawEntries is entries for a map whose layout may be another version's. The bytes
// are valid until the next step.
func rawEntries(m *ebpf.Map) iter.Seq2[entry[[]byte, []byte], error] {
	return func(yield func(entry[[]byte, []byte], error) bool) {
		if m == nil {
			return
		}
		size := min(batchSize, int(m.MaxEntries()))
		keys, values := byteArrays(size, m.KeySize()), byteArrays(size, m.ValueSize())
		err := batches(m, keys.Interface(), values.Interface(), func(n int) bool {
			for i := range n {
				if !yield(entry[[]byte, []byte]{keys.Index(i).Bytes(), values.Index(i).Bytes()}, nil) {
					return false
				}
			}
			return true
		})
		if err != nil {
			yield(entry[[]byte, []byte]{}, err)
		}
	}
}

// byteArrays makes a slice of arrays, whose size is known only now.
func byteArrays(n int, size uint32) reflect.Value {
	element := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(element), n, n)
}

// batches fills two slices again and again, and calls use with how many elements
// they have, until it returns false.
func batches(m *ebpf.Map, keys, values any, use func(n int) bool) error {
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return fmt.Errorf("walk %v: %w", m, err)
		}
		if !use(n) || last {
			return nil
		}
	}
}

// HolderOf returns the owner that an error of AddEndpoint or AddHostPort is about, if any.
func HolderOf(err error) (loader.Owner, bool) {
	var endpoint *EndpointTakenError
	if errors.As(err, &endpoint) {
		return endpoint.Holder.Owner, true
	}
	var port *HostPortTakenError
	if errors.As(err, &port) {
		return port.Holder.Owner, true
	}
	return 0, false
}

// create puts a new entry, or says that there is one.
func create[K, V any](m *ebpf.Map, key *K, value *V) error {
	err := m.Update(key, value, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return ErrTaken
	}
	return err
}

// Owners returns the owners that have devices, endpoints or host ports in a network.
func Owners(dp *loader.Datapath, network Network) (map[loader.Owner]bool, error) {
	owners := map[loader.Owner]bool{}
	for _, m := range []*ebpf.Map{dp.Devices, dp.Endpoints, dp.HostPorts} {
		for entry, err := range rawEntries(m) {
			if err != nil {
				return owners, err
			}
			if networkOf(entry.value) == network {
				owners[ownerOf(entry.key, entry.value)] = true
			}
		}
	}
	return owners, nil
}

// Entries counts what stands in a map, which may be another version's, or nil.
func Entries(m *ebpf.Map) (n int, err error) {
	for _, err := range rawEntries(m) {
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// Count returns how many entries each map has, except those that are arrays.
func Count(dp *loader.Datapath) (map[string]int, error) {
	counts := map[string]int{}
	var errs []error
	for name, m := range map[string]*ebpf.Map{
		bpf.MapEndpoints:   dp.Endpoints,
		bpf.MapDevices:     dp.Devices,
		bpf.MapHostPorts:   dp.HostPorts,
		bpf.MapFlows:       dp.Flows,
		bpf.MapFlowsBackup: dp.FlowsBackup,
		bpf.MapOffloadTCP:  dp.OffloadTcp,
		bpf.MapOffloadUDP:  dp.OffloadUdp,
		bpf.MapFwdCache:    dp.FwdCache,
		bpf.MapUplinks:     dp.Uplinks,
		bpf.MapDrops:       dp.Drops,
	} {
		var err error
		counts[name], err = Entries(m)
		errs = append(errs, err)
	}
	for name, m := range map[string]*ebpf.Map{ // of a kind that has batches only since 5.13
		bpf.MapNonMasqCIDRs:  dp.NonmasqCidrs,
		bpf.MapPortSrcRanges: dp.PortSrcRanges,
	} {
		keys, err := prefixKeys(m)
		counts[name] = len(keys)
		errs = append(errs, err)
	}
	return counts, errors.Join(errs...)
}
