package reconcile

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// ErrSizes says that sizes of packets are not as they should be. What is connected works.
var ErrSizes = errors.New("sizes of packets")

// sizes raises the uplinks' packet sizes if that is wanted, and lowers those of containers to what the
// uplinks take. It raises no container's, because for IPv6 ADD has left no room in its routes.
func sizes(host *netlink.Handle, found Found, raise bool) (resized []string, err error) {
	var raised []string
	var errRaise error
	if raise {
		raised, errRaise = link.Largest.RaiseUplinks(host, found.Uplinks)
	}
	for _, name := range raised {
		resized = append(resized, "packet size of uplink "+name)
	}
	fits, narrowest, err := link.Largest.Within(host, found.Uplinks)
	if err != nil {
		return resized, errors.Join(errRaise, err)
	}
	lowered, errLower := link.LowerPackets(host, found.devices, isOurs, fits)
	for _, name := range lowered {
		resized = append(resized, fmt.Sprintf("packet size of the container behind %s, for uplink %s", name, narrowest))
	}
	if err := errors.Join(errRaise, errLower); err != nil {
		return resized, fmt.Errorf("%w: %w", ErrSizes, err)
	}
	return resized, nil
}

// isOurs returns whether a device is the host's end of a container.
func isOurs(device netlink.Link) bool {
	_, ours := names.ParseAlias(device.Attrs().Alias)
	return ours
}
