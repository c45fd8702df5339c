// Package names derives names from an attachment and back: the host device, its alias, and the MAC
// addresses of a veth pair. One version of ebpfnet writes them and the next one must find them.
package names

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// HostDevice returns the name of the host's end of an attachment's veth pair. It depends on the
// owner alone, so DEL finds the device without a record.
func HostDevice(owner loader.Owner) string {
	return fmt.Sprintf("ebpf%011x", uint64(owner)>>20)
}

// IsHostDevice reports whether a name has the form of HostDevice's.
func IsHostDevice(name string) bool {
	return strings.HasPrefix(name, "ebpf") && len(name) == len(HostDevice(0))
}

// Of returns an attachment's name in messages.
func Of(a maps.Attachment) string {
	return fmt.Sprintf("ebpfnet %s %s %s", a.Network, a.ContainerID, a.IfName)
}

// Fit reports whether the names of an attachment fit into an alias. If not, only its record has them.
func Fit(a maps.Attachment) bool {
	const maxAliasLen = 255 // the kernel's IFALIASZ and its NUL
	return len(Of(a)) <= maxAliasLen
}

// Alias returns the alias of the host's end, which `ip link` shows: the names, or the tokens of the
// network and of the owner if the names do not fit.
func Alias(a maps.Attachment) string {
	if Fit(a) {
		return Of(a)
	}
	return fmt.Sprintf("ebpfnet %08x %s", maps.NetworkToken(a.Network), a.Owner())
}

// Label is the content of an alias.
type Label struct {
	Network    maps.Network
	Owner      loader.Owner
	Attachment maps.Attachment // empty where the alias has only the tokens
}

// ParseAlias parses an alias. ok is false for a device that is not ours.
func ParseAlias(alias string) (label Label, ok bool) {
	words := strings.Fields(alias)
	if len(words) == 0 || words[0] != "ebpfnet" {
		return Label{}, false
	}
	switch len(words) {
	case 4:
		a := maps.Attachment{Network: words[1], ContainerID: words[2], IfName: words[3]}
		return Label{maps.NetworkToken(a.Network), a.Owner(), a}, true
	case 3:
		network, errNetwork := strconv.ParseUint(words[1], 16, 64)
		owner, errOwner := strconv.ParseUint(words[2], 16, 64)
		return Label{Network: maps.Network(network), Owner: loader.Owner(owner)}, errNetwork == nil && errOwner == nil
	default:
		return Label{}, false
	}
}

// IsNamed reports whether the alias has the attachment's names.
func (l Label) IsNamed() bool { return l.Attachment != maps.Attachment{} }

// IsIn reports whether the attachment is in a network.
func (l Label) IsIn(network string) bool {
	if l.IsNamed() {
		return l.Attachment.Network == network
	}
	return l.Network == maps.NetworkToken(network)
}

// HostMAC returns the MAC address of the host's end. Like ContainerMAC it is locally administered
// (bit 1 of the first octet) and derived from the owner, so it need not be read back.
func HostMAC(owner loader.Owner) net.HardwareAddr { return mac(0x06, owner) }

// ContainerMAC returns the MAC address of the container's end unless the runtime asks for another.
func ContainerMAC(owner loader.Owner) net.HardwareAddr { return mac(0x02, owner) }

func mac(first byte, owner loader.Owner) net.HardwareAddr {
	return net.HardwareAddr{first, 0xeb, byte(owner >> 56), byte(owner >> 48), byte(owner >> 40), byte(owner >> 32)}
}
