// Package names derives names from an attachment and back: the host device, its alias, and the MAC
// addresses of a veth pair. One version of ebpfnet writes them and the next one must find them.
//
// It may import loader and maps.
package names

import (
	"fmt"
	"net"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// HostDevice returns the name of the host's end of an attachment's veth pair. It depends on the
// owner alone, so DEL finds the device without a record.
func HostDevice(owner loader.Owner) string {
	return fmt.Sprintf("ebpf%011x", uint64(owner)>>20)
}

// Alias returns the alias of the host's end, which `ip link` shows.
func Alias(a maps.Attachment) string {
	return fmt.Sprintf("ebpfnet %s %s %s", a.Network, a.ContainerID, a.IfName)
}

// ParseAlias returns the attachment that an alias names. ok is false for a device that is not ours.
func ParseAlias(alias string) (a maps.Attachment, ok bool) {
	words := strings.Fields(alias)
	if len(words) != 4 || words[0] != "ebpfnet" {
		return maps.Attachment{}, false
	}
	return maps.Attachment{Network: words[1], ContainerID: words[2], IfName: words[3]}, true
}

// HostMAC returns the MAC address of the host's end. Like ContainerMAC it is locally administered
// (bit 1 of the first octet) and derived from the owner, so nobody has to read it back.
func HostMAC(owner loader.Owner) net.HardwareAddr { return mac(0x06, owner) }

// ContainerMAC returns the MAC address of the container's end unless the runtime asks for another.
func ContainerMAC(owner loader.Owner) net.HardwareAddr { return mac(0x02, owner) }

func mac(first byte, owner loader.Owner) net.HardwareAddr {
	return net.HardwareAddr{first, 0xeb, byte(owner >> 56), byte(owner >> 48), byte(owner >> 40), byte(owner >> 32)}
}
