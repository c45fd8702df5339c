package bpf

import (
	"crypto/sha256"
	"encoding/binary"
)

// Build names the programs that are embedded: other code, other number.
func Build() uint64 {
	sum := sha256.Sum256(_DatapathBytes)
	return binary.BigEndian.Uint64(sum[:8])
}
