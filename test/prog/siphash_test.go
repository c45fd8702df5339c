package prog

import (
	"encoding/binary"
	"math/bits"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// hashSecret is hash_secret of hash.h: SipHash-1-3, with the tests' config.secret.
func hashSecret(a, b bpf.Addr, word uint64) uint64 {
	k0, k1 := secret, ^secret
	v := [4]uint64{k0 ^ 0x736f6d6570736575, k1 ^ 0x646f72616e646f6d, k0 ^ 0x6c7967656e657261, k1 ^ 0x7465646279746573}
	round := func() {
		v[0] += v[1]
		v[1] = bits.RotateLeft64(v[1], 13) ^ v[0]
		v[0] = bits.RotateLeft64(v[0], 32)
		v[2] += v[3]
		v[3] = bits.RotateLeft64(v[3], 16) ^ v[2]
		v[0] += v[3]
		v[3] = bits.RotateLeft64(v[3], 21) ^ v[0]
		v[2] += v[1]
		v[1] = bits.RotateLeft64(v[1], 17) ^ v[2]
		v[2] = bits.RotateLeft64(v[2], 32)
	}
	add := func(word uint64) {
		v[3] ^= word
		round()
		v[0] ^= word
	}
	first := 0
	if isMapped(a) && isMapped(b) {
		first = 3
	}
	for i := first; i < 4; i++ {
		x, y := binary.NativeEndian.Uint32(a.Bytes[4*i:]), binary.NativeEndian.Uint32(b.Bytes[4*i:])
		add(uint64(x)<<32 | uint64(y))
	}
	add(word)
	v[2] ^= 0xff
	round()
	round()
	round()
	return v[0] ^ v[1] ^ v[2] ^ v[3]
}

// isMapped reports whether the address is IPv4.
func isMapped(a bpf.Addr) bool { return [12]byte(a.Bytes[:12]) == [12]byte{10: 0xff, 11: 0xff} }

// backupID is the key's hash in backup_ids.
func backupID(key bpf.FlowKey) uint32 {
	word := uint64(key.RemotePort)<<32 | uint64(key.LocalPort)<<16 | uint64(key.Protocol)<<8 | uint64(key.Kind)
	return uint32(hashSecret(key.Remote, key.Local, word)>>32) | 1
}
