package bpf

import (
	"crypto/sha256"
	"encoding/binary"
)

// Revision orders releases of the programs: raise it with every release that
// changes them. An ADD replaces programs of a lower revision, and other builds of
// its own, but never those of a higher one. So two releases on one host do not
// replace each other's programs in turns.
const Revision = 1

// Build identifies the embedded programs: a hash of their code.
func Build() uint64 {
	sum := sha256.Sum256(_DatapathBytes)
	return binary.BigEndian.Uint64(sum[:8])
}
