package maps

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// ExemptSet names a set of destinations that are not masqueraded, all of one
// family: a token of what it holds, so that all networks with the same list
// share it. 0 is none.
type ExemptSet uint32

// ExemptSetOf returns the name of a set.
func ExemptSetOf(prefixes []netip.Prefix) ExemptSet {
	if len(prefixes) == 0 {
		return 0
	}
	var texts []string
	for _, prefix := range prefixes {
		texts = append(texts, prefix.String())
	}
	slices.Sort(texts)
	return ExemptSet(token(texts...)) | 1 // never 0
}

// AddExempts creates the entries of a set, where they are not there already.
func (s *Store) AddExempts(prefixes []netip.Prefix) error {
	set := ExemptSetOf(prefixes)
	for _, prefix := range prefixes {
		key := exemptKey(set, prefix)
		if err := s.dp.Exempts.Put(&key, uint32(0)); err != nil {
			return fmt.Errorf("put exemption %s: %w", prefix, err)
		}
	}
	return nil
}

// MissingExempts returns those of a set that are not there.
func MissingExempts(dp *loader.Datapath, prefixes []netip.Prefix) ([]netip.Prefix, error) {
	if len(prefixes) == 0 {
		return nil, nil
	}
	keys, err := (&Store{dp}).exempts()
	if err != nil {
		return nil, err
	}
	set := ExemptSetOf(prefixes)
	return slices.DeleteFunc(slices.Clone(prefixes), func(prefix netip.Prefix) bool {
		return slices.Contains(keys, exemptKey(set, prefix))
	}), nil
}

// removeUnusedExempts removes the sets that no endpoint names any more. Those of
// another version stay until they are unloaded.
func (s *Store) removeUnusedExempts() error {
	if s.dp.Exempts == nil {
		return nil
	}
	keys, err := s.exempts()
	if err != nil || len(keys) == 0 {
		return err
	}
	endpoints, err := Endpoints(s.dp)
	if err != nil {
		return err
	}
	used := map[uint32]bool{}
	for _, endpoint := range endpoints {
		used[uint32(endpoint.Exempt)] = true
	}
	var errs []error
	for _, key := range keys {
		if used[key.Set] {
			continue
		}
		if err := s.dp.Exempts.Delete(&key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			errs = append(errs, fmt.Errorf("delete exemption: %w", err))
		}
	}
	return errors.Join(errs...)
}

// exempts walks one by one: tries have no batches before 5.13, and these are few.
func (s *Store) exempts() ([]bpf.DatapathExemptKey, error) {
	var key bpf.DatapathExemptKey
	var value uint32
	var keys []bpf.DatapathExemptKey
	walk := s.dp.Exempts.Iterate()
	for walk.Next(&key, &value) {
		keys = append(keys, key)
	}
	return keys, walk.Err()
}

func exemptKey(set ExemptSet, prefix netip.Prefix) bpf.DatapathExemptKey {
	const setBits = 32

	bits := prefix.Bits()
	if prefix.Addr().Is4() {
		bits += 96 // of the mapped form
	}
	return bpf.DatapathExemptKey{
		Prefix: uint32(setBits + bits),
		Set:    uint32(set),
		Addr:   wireAddr(prefix.Addr()),
	}
}
