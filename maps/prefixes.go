package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// PrefixSet identifies a set of networks by a hash of its members, so that everyone
// with the same list shares the entries of prefixes. 0 means no set. There are sets of
// destinations that are not masqueraded, of host ports' clients, and of routes with gateways.
type PrefixSet uint32

// PrefixSetOf returns the identifier of a set; 0 for an empty one.
func PrefixSetOf(prefixes []netip.Prefix) PrefixSet {
	var texts []string
	for _, prefix := range prefixes {
		texts = append(texts, prefix.String())
	}
	return prefixSetOf(texts)
}

func prefixSetOf(members []string) PrefixSet {
	if len(members) == 0 {
		return 0
	}
	slices.Sort(members)
	return PrefixSet(token(members...)) | 1 // never 0
}

// AddPrefixes creates the missing entries of a set.
func (s *Store) AddPrefixes(prefixes []netip.Prefix) error {
	set := PrefixSetOf(prefixes)
	for _, prefix := range prefixes {
		if err := s.putPrefix(prefixKey(set, prefix), bpf.Addr{}); err != nil {
			return fmt.Errorf("put %s into %v: %w", prefix, s.dp.Prefixes, err)
		}
	}
	return nil
}

// putPrefix writes an entry. value is the gateway of a route, or zeros.
func (s *Store) putPrefix(key bpf.PrefixKey, value bpf.Addr) error {
	if err := s.dp.OpenOnDemand(bpf.MapPrefixes); err != nil {
		return err
	}
	return explainFull(s.dp.Prefixes, s.dp.Prefixes.Put(&key, &value))
}

// MissingPrefixes returns the networks of a set that have no entry.
func MissingPrefixes(dp *loader.Datapath, prefixes []netip.Prefix) ([]netip.Prefix, error) {
	if len(prefixes) == 0 {
		return nil, nil
	}
	present := map[bpf.PrefixKey]bool{}
	for entry, err := range entries[bpf.PrefixKey, bpf.Addr](dp.Prefixes) {
		if err != nil {
			return nil, err
		}
		present[entry.key] = true
	}
	set := PrefixSetOf(prefixes)
	return slices.DeleteFunc(slices.Clone(prefixes), func(prefix netip.Prefix) bool {
		return present[prefixKey(set, prefix)]
	}), nil
}

// removeUnusedPrefixes removes the sets that no endpoint or host port uses any more.
// Another version's sets stay until the datapath is unloaded.
func (s *Store) removeUnusedPrefixes() error {
	listUsed := sync.OnceValues(s.usedPrefixes)
	var errUsed error
	err := removeIf(s.dp.Prefixes, func(set uint32) bool {
		used, err := listUsed()
		errUsed = err
		return err == nil && !used[PrefixSet(set)]
	}, setOf)
	return errors.Join(errUsed, err)
}

// usedPrefixes returns the sets that endpoints and host ports use.
func (s *Store) usedPrefixes() (map[PrefixSet]bool, error) {
	endpoints, errEndpoints := Endpoints(s.dp)
	ports, errPorts := HostPorts(s.dp)
	used := map[PrefixSet]bool{}
	for _, endpoint := range endpoints {
		used[endpoint.NonMasq], used[endpoint.Routes] = true, true
	}
	for _, port := range ports {
		used[port.SrcRanges] = true
	}
	return used, errors.Join(errEndpoints, errPorts)
}
