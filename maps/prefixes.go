package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// PrefixSet identifies a set of networks by a hash of its members, so that everyone
// with the same list shares the entries. 0 means no set. nonmasq_cidrs has the sets of
// destinations that are not masqueraded, port_src_ranges those of host port clients,
// gateway_routes those of routes with gateways.
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

// AddNonMasqCIDRs creates the missing entries of a set of non-masquerade CIDRs.
func (s *Store) AddNonMasqCIDRs(prefixes []netip.Prefix) error {
	return s.addPrefixes(bpf.MapNonMasqCIDRs, &s.dp.NonmasqCidrs, prefixes)
}

// AddSrcRanges creates the missing entries of a set of source ranges.
func (s *Store) AddSrcRanges(prefixes []netip.Prefix) error {
	return s.addPrefixes(bpf.MapPortSrcRanges, &s.dp.PortSrcRanges, prefixes)
}

func (s *Store) addPrefixes(name string, m **ebpf.Map, prefixes []netip.Prefix) error {
	if len(prefixes) == 0 {
		return nil
	}
	if err := s.dp.OpenOnDemand(name); err != nil {
		return err
	}
	set := PrefixSetOf(prefixes)
	for _, prefix := range prefixes {
		key := prefixKey(set, prefix)
		if err := (*m).Put(&key, uint32(0)); err != nil {
			return fmt.Errorf("put %s into %v: %w", prefix, *m, explainFull(*m, err))
		}
	}
	return nil
}

// MissingPrefixes returns the networks of a set that have no entry in a map of sets.
func MissingPrefixes(m *ebpf.Map, prefixes []netip.Prefix) ([]netip.Prefix, error) {
	if len(prefixes) == 0 {
		return nil, nil
	}
	present := map[bpf.PrefixKey]bool{}
	for entry, err := range entries[bpf.PrefixKey, uint32](m) {
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
	if s.dp.NonmasqCidrs == nil {
		return nil
	}
	return errors.Join(
		removePrefixesExcept(s.dp.NonmasqCidrs, func() (map[PrefixSet]bool, error) {
			return s.setsOf(func(e Endpoint) PrefixSet { return e.NonMasq })
		}),
		removePrefixesExcept(s.dp.GatewayRoutes, func() (map[PrefixSet]bool, error) {
			return s.setsOf(func(e Endpoint) PrefixSet { return e.Routes })
		}),
		removePrefixesExcept(s.dp.PortSrcRanges, func() (map[PrefixSet]bool, error) {
			ports, err := HostPorts(s.dp)
			used := map[PrefixSet]bool{}
			for _, port := range ports {
				used[port.SrcRanges] = true
			}
			return used, err
		}),
	)
}

// setsOf returns the sets that endpoints use.
func (s *Store) setsOf(set func(Endpoint) PrefixSet) (map[PrefixSet]bool, error) {
	endpoints, err := Endpoints(s.dp)
	used := map[PrefixSet]bool{}
	for _, endpoint := range endpoints {
		used[set(endpoint)] = true
	}
	return used, err
}

func removePrefixesExcept(m *ebpf.Map, listUsed func() (map[PrefixSet]bool, error)) error {
	used := sync.OnceValues(listUsed)
	var errUsed error
	err := removeIf(m, func(set uint32) bool {
		sets, err := used()
		errUsed = err
		return err == nil && !sets[PrefixSet(set)]
	}, setOf)
	return errors.Join(errUsed, err)
}

const (
	setBits    = 32 // the set precedes the address
	mappedBits = 96 // precede an IPv4 address in its mapped form
)

func prefixKey(set PrefixSet, prefix netip.Prefix) bpf.PrefixKey {
	bits := prefix.Bits()
	if prefix.Addr().Is4() {
		bits += mappedBits
	}
	return bpf.PrefixKey{
		Prefixlen: uint32(setBits + bits),
		Set:       uint32(set),
		Addr:      wireAddr(prefix.Addr()),
	}
}
