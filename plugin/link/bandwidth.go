package link

import (
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Bandwidth limits a container's traffic: ingress is what the container receives, egress what it sends. Traffic with
// peers in the networks of Unshaped has no limit.
type Bandwidth struct {
	Ingress  Limit          `json:"ingress,omitzero"`
	Egress   Limit          `json:"egress,omitzero"`
	Unshaped []netip.Prefix `json:"unshaped,omitempty"`
}

// IsEmpty reports whether there is no limit.
func (b Bandwidth) IsEmpty() bool { return b.Ingress.Rate == 0 && b.Egress.Rate == 0 }

// IsZero makes encoding/json omit a Bandwidth without limits.
func (b Bandwidth) IsZero() bool { return b.IsEmpty() }

// Shape sets the limits of both ends of a pair: ingress where the host's end transmits, egress
// where the container's end transmits, so that the container's sockets wait instead of losing
// packets. An empty Bandwidth removes the limits.
func (b Bandwidth) Shape(host, container *netlink.Handle, outside, inside netlink.Link) error {
	if err := Shape(host, outside, b.Ingress, b.Unshaped, PeerIsSource); err != nil {
		return err
	}
	return Shape(container, inside, b.Egress, b.Unshaped, PeerIsDestination)
}
