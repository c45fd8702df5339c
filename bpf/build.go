package bpf

import (
	"crypto/sha256"
	"encoding/binary"
)

// Revision tells newer programs from older ones: raise it with every release
// that changes them. An ADD replaces programs of a lower revision, and others of
// its own, but never those of a higher one, so that two releases on one host do
// not take turns.
const Revision = 1

// Build names the programs that are embedded: other code, other number.
func Build() uint64 {
	sum := sha256.Sum256(_DatapathBytes)
	return binary.BigEndian.Uint64(sum[:8])
}
