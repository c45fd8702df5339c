package maps

import (
	"fmt"
	"math/rand/v2"

	"github.com/ebpfnet/ebpfnet/bpf"
)

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
