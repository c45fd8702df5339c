package link

import (
	"fmt"

	"github.com/vishvananda/netlink"
)

// OutsideMTU returns the MTU of the host's default routes, the smaller one of both families, or the MTU of Ethernet if
// there is no default route.
func OutsideMTU(host *netlink.Handle) (int, error) {
	const ethernet = 1500

	least, byDevice := 0, map[int]int{}
	for _, ip := range outside {
		routes, err := host.RouteGet(ip)
		if err != nil || len(routes) == 0 {
			continue // no default route
		}
		mtu := routes[0].MTU
		if mtu == 0 {
			mtu = byDevice[routes[0].LinkIndex]
		}
		if mtu == 0 {
			device, err := Device(host, routes[0].LinkIndex)
			if err != nil {
				return 0, fmt.Errorf("look up the device of the default route: %w", err)
			}
			if device == nil {
				continue
			}
			mtu = device.Attrs().MTU
			byDevice[routes[0].LinkIndex] = mtu
		}
		if least == 0 || mtu < least {
			least = mtu
		}
	}
	if least == 0 {
		return ethernet, nil
	}
	return least, nil
}
