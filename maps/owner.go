package maps

import (
	"crypto/sha256"
	"encoding/binary"

	"github.com/ebpfnet/ebpfnet/loader"
)

// Attachment is one interface of one container in one network, the unit of the CNI
// specification. It suffices for finding everything that was created for it.
type Attachment struct {
	Network     string `json:"network"`
	ContainerID string `json:"containerID"`
	IfName      string `json:"ifname"`
}

// Owner returns the attachment's token, which each of its map entries carries. An entry
// is removed only by its owner, so a late DEL cannot remove the entries of a newer
// attachment with the same address.
func (a Attachment) Owner() loader.Owner {
	return loader.Owner(token(a.Network, a.ContainerID, a.IfName))
}

// Network is a network's token, by which GC finds its entries.
type Network uint32

// NetworkToken returns the token of the network with that name.
func NetworkToken(name string) Network {
	return Network(token(name))
}

// Container is a container's token, shared by all its attachments.
type Container uint64

// ContainerToken returns the token of the container with that id.
func ContainerToken(id string) Container {
	return Container(token("", id))
}

// token hashes its parts, separated by NUL, which no name contains.
func token(parts ...string) uint64 {
	hash := sha256.New()
	for _, part := range parts {
		hash.Write([]byte(part))
		hash.Write([]byte{0})
	}
	return binary.BigEndian.Uint64(hash.Sum(nil))
}
