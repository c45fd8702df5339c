package maps

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/ebpfnet/ebpfnet/loader"
)

// Attachment is one interface of one container in one network, the unit of the
// CNI specification. Everything that is created for it is found again by it.
type Attachment struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// Owner is the attachment's token, which every map value carries: an entry is
// removed by its owner or not at all, so a late DEL cannot take what a newer
// attachment with the same address has put there.
func (a Attachment) Owner() loader.Owner {
	return loader.Owner(token(a.Network, a.ContainerID, a.IfName))
}

// Network is a network's token, by which GC finds the entries of one network.
type Network uint32

// NetworkToken returns the token of a network by its name.
func NetworkToken(name string) Network {
	return Network(token(name))
}

// Container is a container's token, which all of its attachments share.
type Container uint32

// ContainerToken returns the token of a container by its id.
func ContainerToken(id string) Container {
	return Container(token("", id))
}

// token hashes its parts. They are kept apart by NUL, which no name contains.
func token(parts ...string) uint64 {
	hash := sha256.New()
	for _, part := range parts {
		hash.Write([]byte(part))
		hash.Write([]byte{0})
	}
	return binary.BigEndian.Uint64(hash.Sum(nil))
}
