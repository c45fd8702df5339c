// Package maps is the typed view of the datapath's maps: it converts between their
// bytes and Go values, and adds, lists and removes entries. The table "Maps" in
// bpf/README.md says what each map holds, who writes it and who removes it.
//
// A function that only reads takes an open *loader.Datapath. A map that is not open
// (nil) reads as empty: see loader.Open and loader.OpenForRelease for which maps are.
// Everything that writes is a method of Store, and With, which holds the datapath's
// lock, is the only source of a Store. After a change With voids the decisions that the
// programs keep (NewGeneration). Endpoints and host ports are created, never
// overwritten, and removed by owner; entries of devices and uplinks are replaced.
//
// It imports loader and bpf; the plugin and the commands import it.
package maps

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"
	"reflect"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// ErrTaken is wrapped by the error for a key that another owner has.
var ErrTaken = errors.New("taken by another attachment")

// TakenError reports an address or a host port that another attachment has. It wraps ErrTaken.
type TakenError struct {
	Holder loader.Owner
	IsPort bool
	text   string
}

func (e *TakenError) Error() string { return e.text }

// Unwrap returns ErrTaken.
func (e *TakenError) Unwrap() error { return ErrTaken }

// ErrFull is wrapped by the error for a full map.
var ErrFull = errors.New("a limit of this host is reached")

// Store writes to the maps of an open datapath.
type Store struct {
	dp      *loader.Datapath
	changed bool // With starts a new generation

	specific   []HostPort      // see specificHostPorts; nil: not listed yet
	newNumbers map[uint32]bool // see setNumber: the bytes of port_marks that s has set

	revoked   []*bpf.Policy // see finishPolicies: what they admit has changed
	hasUnused bool          // a policy no longer refers to a rule set
}

// With calls change with the datapath's lock held, and then starts a new generation if
// change has written something that decisions depend on. ctx bounds the wait for the lock;
// the error then wraps flock.ErrBusy.
func With(ctx context.Context, dp *loader.Datapath, change func(*Store) error) error {
	lock, err := dp.Lock(ctx)
	if err != nil {
		return err
	}
	s := &Store{dp: dp, newNumbers: map[uint32]bool{}}
	err = errors.Join(change(s), s.finish())
	if !s.hasUnused { // others need not wait for programs
		err = errors.Join(err, lock.Release())
	}
	return errors.Join(err, s.finishPolicies(), lock.Release())
}

// CloseHostPorts removes an owner's host ports, so that they accept no new connections.
// After the last host port it also detaches the program from lo. ReleaseClosed must
// follow: it starts the new generation for both.
func (s *Store) CloseHostPorts(owner loader.Owner) error {
	return s.closeHostPorts(map[loader.Owner]bool{owner: true})
}

func (s *Store) closeHostPorts(owners map[loader.Owner]bool) error {
	s.specific = nil
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

// Release removes the entries of an owner, host ports first, so that they accept no new connection.
// It continues after errors. Flows stay, because finding them requires a walk over
// all flows, and the programs ignore a flow whose owner has no endpoint.
func (s *Store) Release(owner loader.Owner) error {
	return s.ReleaseAll(map[loader.Owner]bool{owner: true})
}

// ReleaseClosed removes the remaining entries of an owner after CloseHostPorts.
func (s *Store) ReleaseClosed(owner loader.Owner) error {
	return s.release(map[loader.Owner]bool{owner: true})
}

// ReleaseAll removes the entries of many owners in one walk over the maps.
func (s *Store) ReleaseAll(owners map[loader.Owner]bool) error {
	return errors.Join(s.closeHostPorts(owners), s.release(owners))
}

func (s *Store) release(owners map[loader.Owner]bool) error {
	s.changed = true
	if err := s.dp.OpenOnDemand(bpf.MapPrefixes, bpf.MapDrops); err != nil {
		return err
	}
	return errors.Join(
		removeOwned(s.dp.Endpoints, owners, ownerOf),
		removeOwned(s.dp.Devices, owners, ownerOf),
		s.freePolicies(func(owner loader.Owner) bool { return owners[owner] }),
		s.removeUnusedPrefixes(),
		removeOwned(s.dp.Drops, owners, ownerOfKey),
	)
}

// ownerHost owns the host's own connections: OWNER_HOST in bpf/abi.h.
const ownerHost loader.Owner = 0

// livingOwners returns the owners that have a device or an endpoint, in any network, and the host.
func livingOwners(dp *loader.Datapath) (map[loader.Owner]bool, error) {
	living := map[loader.Owner]bool{ownerHost: true}
	for _, m := range []*ebpf.Map{dp.Devices, dp.Endpoints} {
		for entry, err := range rawEntries(m) {
			if err != nil {
				return nil, err
			}
			living[ownerOf(entry.key, entry.value)] = true
		}
	}
	return living, nil
}

// RemoveOrphans removes the admitted flows and drop counters of owners that have neither device
// nor endpoint. A packet during a Release may have left such a counter. In flow_table, others replace
// the flows of removed owners.
func (s *Store) RemoveOrphans() error {
	living, err := livingOwners(s.dp)
	if err != nil {
		return err
	}
	orphan := func(owner loader.Owner) bool { return !living[owner] }
	return errors.Join(
		s.freePolicies(orphan),
		removeIf(s.dp.AdmittedFlows, orphan, ownerOf),
		removeIf(s.dp.Drops, orphan, ownerOfKey),
	)
}

func removeOwned(m *ebpf.Map, owners map[loader.Owner]bool, ownerOf func(key, value []byte) loader.Owner) error {
	return removeIf(m, func(owner loader.Owner) bool { return owners[owner] }, ownerOf)
}

// removeIf removes the entries of the selected owners, or sets. It collects the keys before it
// deletes any, because deleting disturbs a walk. It reads only the part of a value that is
// the same in every version (bpf/abi.h).
func removeIf[T any](m *ebpf.Map, remove func(T) bool, of func(key, value []byte) T) error {
	var keys [][]byte
	for entry, err := range rawEntries(m) {
		if err != nil {
			return err
		}
		if remove(of(entry.key, entry.value)) {
			keys = append(keys, slices.Clone(entry.key))
		}
	}
	if len(keys) == 0 {
		return nil
	}
	return deleteAll(m, keys)
}

// deleteAll deletes entries with as few system calls as possible. An entry may be gone
// already: programs and LRU maps delete, too.
func deleteAll(m *ebpf.Map, keys [][]byte) error {
	batch := byteArrays(len(keys), m.KeySize())
	for i, key := range keys {
		reflect.Copy(batch.Index(i), reflect.ValueOf(key))
	}
	for next := 0; next < len(keys); {
		n, err := m.BatchDelete(batch.Slice(next, len(keys)).Interface(), nil)
		if errors.Is(err, ebpf.ErrNotSupported) { // by LPM tries before Linux 5.13
			n, err = 1, m.Delete(keys[next])
		} else if errors.Is(err, ebpf.ErrKeyNotExist) {
			n++
		}
		next += n
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("delete from %v: %w", m, err)
		}
	}
	return nil
}

// setOf returns the set of an entry of an LPM trie. All of them have it behind the prefix length.
func setOf(key, _ []byte) uint32 { return binary.NativeEndian.Uint32(key[4:]) }

func ownerOf(_, value []byte) loader.Owner { return loader.Owner(binary.NativeEndian.Uint64(value)) }

// ownerOfKey returns the owner of a drop counter, which is in its key.
func ownerOfKey(key, _ []byte) loader.Owner { return loader.Owner(binary.NativeEndian.Uint64(key)) }

// networkOf returns the network of a device, an endpoint or a host port.
func networkOf(value []byte) Network {
	const ownerSize = 8

	return Network(binary.NativeEndian.Uint32(value[ownerSize:]))
}

type entry[K, V any] struct {
	key   K
	value V
}

// batchSize is the number of entries per system call. It must hold the largest hash bucket.
const batchSize = 4096

// entries walks a hash map or an LPM trie in batches; a nil map is empty. It may miss entries that are
// added or removed meanwhile. An error ends the walk.
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

// collect lists the entries of a map, as of returns them, in no particular order.
func collect[K, V, T any](m *ebpf.Map, of func(K, V) T) ([]T, error) {
	var list []T
	for entry, err := range entries[K, V](m) {
		if err != nil {
			return nil, err
		}
		list = append(list, of(entry.key, entry.value))
	}
	return list, nil
}

// rawEntries is entries for a map that may have another version's layout. The bytes are valid until the next step.
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

// byteArrays returns a slice of arrays, whose size is known only at run time.
func byteArrays(n int, size uint32) reflect.Value {
	element := reflect.ArrayOf(int(size), reflect.TypeFor[byte]())
	return reflect.MakeSlice(reflect.SliceOf(element), n, n)
}

// batches fills the two slices repeatedly and calls use with the number of elements,
// until use returns false.
func batches(m *ebpf.Map, keys, values any, use func(n int) bool) error {
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, ebpf.ErrNotSupported) { // by LPM tries before Linux 5.13
			return eachEntry(m, keys, values, use)
		}
		last := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !last {
			return fmt.Errorf("walk %v: %w", m, err)
		}
		if !use(n) || last {
			return nil
		}
	}
}

// eachEntry is batches of one entry.
func eachEntry(m *ebpf.Map, keys, values any, use func(n int) bool) error {
	key, value := reflect.ValueOf(keys).Index(0).Addr().Interface(), reflect.ValueOf(values).Index(0).Addr().Interface()
	walk := m.Iterate()
	for walk.Next(key, value) && use(1) {
	}
	if err := walk.Err(); err != nil {
		return fmt.Errorf("walk %v: %w", m, err)
	}
	return nil
}

// create adds an entry, or returns ErrTaken if the key exists.
func create[K, V any](m *ebpf.Map, key *K, value *V) error {
	err := m.Update(key, value, ebpf.UpdateNoExist)
	if errors.Is(err, ebpf.ErrKeyExist) {
		return ErrTaken
	}
	return explainFull(m, err)
}

// explainFull explains the kernel's errors for a full hash map or LPM trie.
func explainFull(m *ebpf.Map, err error) error {
	if errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
		return fmt.Errorf("%w: all %d entries of %v are in use", ErrFull, m.MaxEntries(), m)
	}
	return err
}

// Owners returns the owners of devices, endpoints and host ports in a network.
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

// Entries counts the entries of a hash map or an LPM trie, which may be another version's, or nil.
func Entries(m *ebpf.Map) (n int, err error) {
	for _, err := range rawEntries(m) {
		if err != nil {
			return n, err
		}
		n++
	}
	return n, nil
}

// Count returns the number of entries of each open map, or of some. It omits arrays, which are always
// full.
func Count(dp *loader.Datapath, only ...string) (map[string]int, error) {
	counts := map[string]int{}
	var errs []error
	for name, m := range dp.OpenMaps() {
		if len(only) > 0 && !slices.Contains(only, name) {
			continue
		}
		switch m.Type() {
		case ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie:
			n, err := Entries(m)
			counts[name], errs = n, append(errs, err)
		}
	}
	return counts, errors.Join(errs...)
}

// The programs keep decisions about connections, each with the number that map generation had
// when they made it. A decision with another number is void.

// NewGeneration has With start a new generation even if nothing has been written.
func (s *Store) NewGeneration() { s.changed = true }

// KeepGeneration has With start no new generation yet: the caller is about to change more
// in another With, or fails and then releases its entries.
func (s *Store) KeepGeneration() { s.changed = false }

// finish starts a new generation after a change. A random number is new without reading the present one.
// The programs compare only its lower half.
func (s *Store) finish() error {
	if !s.changed {
		return nil
	}
	if err := s.dp.OpenOnDemand(bpf.MapGeneration); err != nil || s.dp.Generation == nil {
		return err
	}
	if err := s.dp.Generation.Put(uint32(0), rand.Uint64()); err != nil {
		return fmt.Errorf("make a new generation: %w", err)
	}
	return nil
}
