package migrate

import (
	"cmp"
	"slices"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Containers that are adopted stay on their bridge. They look there for all addresses of their subnet, also for
// those of containers that ebpfnet makes, which are not there. For IPv4 the bridge can answer in their place
// (proxy ARP): then the host forwards, as it does for new containers. For IPv6 the kernel would have to be told
// each of their addresses.

// lookAtBridge blocks a network whose bridge has a port that is none of its containers': they share their LAN
// with whatever is behind it.
func (h *host) lookAtBridge(n *Network) {
	name := bridgeOf(n.list)
	bridge := slices.IndexFunc(h.devices, func(device netlink.Link) bool { return device.Attrs().Name == name })
	if name == "" || bridge < 0 {
		return
	}
	for _, port := range h.devices {
		isContainers := func(c Container) bool { return c.Device == port.Attrs().Name }
		if port.Attrs().MasterIndex == h.devices[bridge].Attrs().Index && !slices.ContainsFunc(n.Containers, isContainers) {
			n.block("the bridge %s has the port %s, which is none of this network's containers': they are in one LAN with it", name, port.Attrs().Name)
		}
	}
}

// bridgeOf returns the bridge of a list, or "".
func bridgeOf(list *libcni.NetworkConfigList) string {
	keys, _ := keysOf(list.Plugins[0])
	switch list.Plugins[0].Network.Type {
	case "bridge":
	case "flannel":
		keys, _ = keys["delegate"].(object)
	default:
		return ""
	}
	name, _ := keys["bridge"].(string)
	return cmp.Or(name, "cni0")
}

// answerForOthers has the bridge of a network answer for containers that are not on it, or no longer.
func (n *Network) answerForOthers(answers bool) error {
	bridge := bridgeOf(n.list)
	if bridge == "" {
		return nil
	}
	return link.SetProxyARP(bridge, answers)
}

// hasIPv6 says whether the container looks for others by neighbor discovery.
func (c *Container) hasIPv6() bool {
	return slices.ContainsFunc(c.result.IPs, func(ip *types100.IPConfig) bool { return ip.Address.IP.To4() == nil })
}
