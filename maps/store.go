// Package maps is the typed view of the datapath's maps: what user space writes
// into them, reads from them, and removes.
//
//	map        key                              value                          written by   removed by
//	endpoints  container address                veth, MACs, masquerade or not  ADD          owner's DEL, GC
//	devices    host's end of a veth             owner, what it may send        ADD          owner's DEL, GC
//	ports      host address or any, port, prot. container address and port     ADD          owner's DEL, GC
//	flows      remote, local, protocol, kind    translated address and port    programs     kernel (LRU), owner's DEL, GC
//	uplinks    device                           its addresses                  ADD          ADD, when the device is gone
//	counters   reason of a drop                 packets and bytes per CPU      programs     never
//	drops      owner, reason                    packets and bytes              programs     owner's DEL, GC
//
// Whoever writes holds the datapath's lock; the only way to a Store that writes
// is With, which takes it. Entries are created, never overwritten, and removed
// by owner.
package maps

import (
	"context"
	"errors"
	"fmt"
	"iter"

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

// ClosePorts removes an owner's host ports, so that nothing new comes in by
// them. With the last one the host's own traffic is left alone again.
func (s *Store) ClosePorts(owner loader.Owner) error {
	return s.closePorts(map[loader.Owner]bool{owner: true})
}

func (s *Store) closePorts(owners map[loader.Owner]bool) error {
	if err := s.removePorts(owners); err != nil {
		return err
	}
	var any bpf.DatapathPortKey
	err := s.dp.Ports.NextKey(nil, &any)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return s.dp.DetachHost()
	}
	return err
}

func (s *Store) removePorts(owners map[loader.Owner]bool) error {
	return removeOwned(s.dp.Ports, owners, func(_ bpf.DatapathPortKey, v bpf.DatapathPort) uint64 { return v.Owner })
}

// Release removes all entries of one owner: ports first, so that nothing new
// comes in, and flows last, since packets make them as long as there are ports
// and endpoints. It goes on after errors.
func (s *Store) Release(owner loader.Owner) error {
	return s.ReleaseAll(map[loader.Owner]bool{owner: true})
}

// ReleaseAll is Release for many owners at the price of one walk over the maps.
func (s *Store) ReleaseAll(owners map[loader.Owner]bool) error {
	return errors.Join(
		s.closePorts(owners),
		removeOwned(s.dp.Endpoints, owners, func(_ bpf.DatapathAddr, v bpf.DatapathEndpoint) uint64 { return v.Owner }),
		removeOwned(s.dp.Devices, owners, func(_ uint32, v bpf.DatapathDevice) uint64 { return v.Owner }),
		s.removeUnusedPrefixes(),
		removeOwned(s.dp.Established, owners, ownerOfFlow),
		removeOwned(s.dp.Flows, owners, ownerOfFlow),
		removeOwned(s.dp.Drops, owners, func(k bpf.DatapathDropKey, _ bpf.DatapathCounter) uint64 { return k.Owner }),
	)
}

func ownerOfFlow(_ bpf.DatapathFlowKey, v bpf.DatapathFlow) uint64 { return v.Owner }

// removeOwned collects the keys before it deletes, since deleting disturbs a walk.
func removeOwned[K, V any](m *ebpf.Map, owners map[loader.Owner]bool, ownerOf func(K, V) uint64) error {
	var owned []K
	for entry, err := range entries[K, V](m) {
		if err != nil {
			return err
		}
		if owners[loader.Owner(ownerOf(entry.key, entry.value))] {
			owned = append(owned, entry.key)
		}
	}
	var errs []error
	for i := range owned {
		if err := m.Delete(&owned[i]); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete from %v: %w", m, err))
		}
	}
	return errors.Join(errs...)
}

type entry[K, V any] struct {
	key   K
	value V
}

// batchSize is what one system call returns: large enough for every hash bucket.
const batchSize = 4096

// entries walks a hash map in batches (kernel 5.6). Entries that come or go
// meanwhile may be missed. An error ends the walk.
func entries[K, V any](m *ebpf.Map) iter.Seq2[entry[K, V], error] {
	return func(yield func(entry[K, V], error) bool) {
		size := min(batchSize, int(m.MaxEntries()))
		keys, values := make([]K, size), make([]V, size)
		var cursor ebpf.MapBatchCursor
		for {
			n, err := m.BatchLookup(&cursor, keys, values, nil)
			last := errors.Is(err, ebpf.ErrKeyNotExist)
			if err != nil && !last {
				yield(entry[K, V]{}, fmt.Errorf("walk %v: %w", m, err))
				return
			}
			for i := range n {
				if !yield(entry[K, V]{keys[i], values[i]}, nil) {
					return
				}
			}
			if last {
				return
			}
		}
	}
}

// HolderOf returns the owner that an error of AddEndpoint or AddPort is about, if any.
func HolderOf(err error) (loader.Owner, bool) {
	var endpoint *EndpointTakenError
	if errors.As(err, &endpoint) {
		return endpoint.Holder.Owner, true
	}
	var port *PortTakenError
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
	endpoints, endpointsErr := Endpoints(dp)
	for _, endpoint := range endpoints {
		if endpoint.Network == network {
			owners[endpoint.Owner] = true
		}
	}
	devices, devicesErr := Devices(dp)
	for _, device := range devices {
		if device.Network == network {
			owners[device.Owner] = true
		}
	}
	ports, portsErr := Ports(dp)
	for _, port := range ports {
		if port.Network == network {
			owners[port.Owner] = true
		}
	}
	return owners, errors.Join(endpointsErr, devicesErr, portsErr)
}

// Count returns how many entries each map has, except those that are arrays.
func Count(dp *loader.Datapath) (map[string]int, error) {
	endpoints, endpointsErr := Endpoints(dp)
	ports, portsErr := Ports(dp)
	flows, flowsErr := Flows(dp)
	established, establishedErr := Established(dp)
	uplinks, uplinksErr := Uplinks(dp)
	exempts, exemptsErr := prefixKeys(dp.Exempts)
	sources, sourcesErr := prefixKeys(dp.Sources)
	devices, devicesErr := Devices(dp)
	drops, dropsErr := Drops(dp)
	return map[string]int{
		bpf.DatapathMapEndpoints:   len(endpoints),
		bpf.DatapathMapPorts:       len(ports),
		bpf.DatapathMapFlows:       len(flows),
		bpf.DatapathMapEstablished: len(established),
		bpf.DatapathMapUplinks:     len(uplinks),
		bpf.DatapathMapExempts:     len(exempts),
		bpf.DatapathMapSources:     len(sources),
		bpf.DatapathMapDevices:     len(devices),
		bpf.DatapathMapDrops:       len(drops),
	}, errors.Join(endpointsErr, portsErr, flowsErr, establishedErr, uplinksErr, exemptsErr, sourcesErr, devicesErr, dropsErr)
}
