package migrate

import (
	"cmp"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// An adopted container stays on its bridge. It looks there for all addresses of its subnet, also for those of containers
// that ebpfnet makes, which are not there. For IPv4 the bridge can answer in their place (proxy ARP): then the host
// forwards, as it does for new containers. For IPv6 the kernel would need each of their addresses.

// lookAtBridge blocks a network whose bridge has a port that is not a container's: the containers share their LAN with
// whatever is behind that port.
func (h *host) lookAtBridge(n *Network) {
	bridge := h.deviceOf(n)
	if bridge == nil {
		return
	}
	for _, port := range h.devices {
		isContainers := func(c Container) bool { return c.Device == port.Attrs().Name }
		if port.Attrs().MasterIndex == bridge.Index && !slices.ContainsFunc(n.Containers, isContainers) {
			n.block("the bridge %s has the port %s, which is none of this network's containers': they are in one LAN with it", bridge.Name, port.Attrs().Name)
		}
	}
}

// bridgeOf returns the bridge of a list, or "".
func bridgeOf(list *libcni.NetworkConfigList) string {
	if list.Plugins[0].Network.Type != "bridge" {
		return ""
	}
	keys, _ := keysOf(list.Plugins[0])
	name, _ := keys["bridge"].(string)
	return cmp.Or(name, "cni0")
}

// deviceOf returns the bridge of a network, or nil.
func (h *host) deviceOf(n *Network) *netlink.LinkAttrs {
	i := slices.IndexFunc(h.devices, func(d netlink.Link) bool { return d.Attrs().Name == bridgeOf(n.list) })
	if i < 0 {
		return nil
	}
	return h.devices[i].Attrs()
}

// setProxyARP sets whether the bridge of a network, if it has one, answers at once for containers that are not on it.
func (h *host) setProxyARP(n *Network, on bool) error {
	if bridge := h.deviceOf(n); bridge != nil {
		return link.SetProxyARP(bridge.Name, on)
	}
	return nil
}
