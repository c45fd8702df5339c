package migrate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

// Action is what happens to a container.
type Action string

// The actions.
const (
	Adopt   Action = "adopt"   // it continues to run, and its connections stay open
	Adopted Action = "adopted" // that is done
	Restart Action = "restart" // it has to be stopped before
)

// Container is a running container of an old network.
type Container struct {
	admin.Named
	Action    Action   `json:"action"`
	Device    string   `json:"device"` // the host's end of its veth
	Addresses []string `json:"addresses"`

	attached bool // to ebpfnet; if it is not adopted, a migrate was killed
	cached   *libcni.NetworkAttachment
	list     *libcni.NetworkConfigList // that made it
	given    types.Result              // in the list's version
	result   *types100.Result
}

// isReleasable reports whether ebpfnet is attached to the container.
func (c Container) isReleasable() bool { return c.Action == Adopted || c.attached }

// lookAtContainers finds the running containers of a network in libcni's cache. A container that differs from the cache
// blocks the network.
func (h *host) lookAtContainers(n *Network) error {
	all, err := containers.Cached(h.CacheDir)
	if err != nil {
		return err
	}
	isIPv6 := func(address string) bool { return strings.Contains(address, ":") }
	names := containers.Names(context.Background(), h.CacheDir)
	for _, cached := range all {
		if cached.Network != n.Name {
			continue
		}
		c, err := h.lookAtContainer(cached)
		if err != nil {
			n.block("container %s: %v", cmp.Or(names[cached.ContainerID], cached.ContainerID), err)
		}
		if c == nil {
			continue
		}
		c.Name = names[c.ContainerID]
		if err != nil {
			c.Action = Restart
		}
		if c.Action == Adopt && bridgeOf(n.list) != "" && slices.ContainsFunc(c.Addresses, isIPv6) {
			c.Action = Restart
			n.block("container %s has IPv6 and is on a bridge, where it would not find new containers of its subnet: stop it, and start it again afterwards", c.Title())
		}
		n.Containers = append(n.Containers, *c)
	}
	return nil
}

// lookAtAddresses blocks a network that has a container that libcni's cache does not have, and that ebpfnet did not make:
// it has a reservation, and the host has a route to its veth.
func (h *host) lookAtAddresses(n *Network) error {
	files, err := os.ReadDir(filepath.Join(h.Root, n.translation.reservations))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, file := range files {
		addr, errName := netip.ParseAddr(file.Name())
		hasIt := func(c Container) bool { return slices.Contains(c.Addresses, addr.String()) }
		if errName != nil || slices.ContainsFunc(n.Containers, hasIt) {
			continue // the lock; or we know its container
		}
		routes, errRoute := h.netlink.RouteGet(addr.AsSlice())
		if errRoute != nil || len(routes) == 0 || routes[0].Gw != nil {
			continue
		}
		for _, device := range h.devices {
			_, isOurs := names.ParseAlias(device.Attrs().Alias)
			if device.Attrs().Index == routes[0].LinkIndex && device.Type() == "veth" && !isOurs {
				n.block("the address %v is in use behind %s, by a container that libcni's cache does not know: stop it", addr, device.Attrs().Name)
			}
		}
	}
	return err
}

// lookAtContainer returns nil for a container that is gone, and for a container that ebpfnet made.
func (h *host) lookAtContainer(cached *libcni.NetworkAttachment) (*Container, error) {
	attachment := maps.Attachment{Network: cached.Network, ContainerID: cached.ContainerID, IfName: cached.IfName}
	c := &Container{Named: admin.Named{Attachment: attachment, Owner: attachment.Owner().String()},
		Action: Adopt, Addresses: []string{}, cached: cached}
	if name := c.cacheName(); name != "results/"+filepath.Base(name) {
		return nil, fmt.Errorf("libcni's cache has a name that a file cannot have: %q", name)
	}
	var err error
	if c.list, err = libcni.NetworkConfFromBytes(cached.Config); err != nil || len(c.list.Plugins) == 0 {
		return nil, errors.Join(errors.New("libcni's cache has no valid list"), err)
	}
	if c.list.Plugins[0].Network.Type == config.PluginType {
		return nil, nil
	}
	rt := &libcni.RuntimeConf{ContainerID: cached.ContainerID, IfName: cached.IfName}
	c.given, err = h.cni.GetNetworkListCachedResult(c.list, rt)
	if err != nil || c.given == nil {
		return nil, errors.Join(errors.New("libcni's cache has no valid result"), err)
	}
	if hasPlugin(c.list, config.PluginType) {
		c.Action = Adopted
	}
	if c.result, err = types100.NewResultFromResult(c.given); err != nil {
		return nil, err
	}
	device, ns, err := h.find(c.result)
	if device == nil || err != nil {
		return nil, err
	}
	defer ns.Close()
	rec, err := h.records.Read(c.Attachment.Owner())
	if err != nil {
		return nil, err
	}
	c.attached = rec != nil && rec.Chained != nil
	c.Device = device.Attrs().Name
	for _, ip := range c.result.IPs {
		c.Addresses = append(c.Addresses, ip.Address.IP.String())
	}
	return c, c.compare(ns)
}

// find returns the host's end of the veth that a result names, and the namespace behind it. There is no
// device where the container is gone.
func (h *host) find(result *types100.Result) (netlink.Link, netns.NsHandle, error) {
	var named []string
	for _, i := range result.Interfaces {
		if i.Sandbox == "" {
			named = append(named, i.Name)
		}
	}
	if len(named) == 0 {
		return nil, netns.None(), errors.New("its result names no device of the host")
	}
	for _, device := range h.devices {
		if device.Type() == "veth" && slices.Contains(named, device.Attrs().Name) {
			ns, err := link.NamespaceOfPeer(h.netlink, device)
			return device, ns, err
		}
	}
	return nil, netns.None(), nil
}

// compare compares the container's interface with the result: another container may have the device's name by now.
func (c *Container) compare(ns netns.NsHandle) error {
	container, err := rtnl.OpenAt(ns)
	if err != nil {
		return err
	}
	defer container.Close()
	device, err := link.Find(container, c.IfName)
	if err != nil || device == nil {
		return errors.Join(fmt.Errorf("it has no %s any more", c.IfName), err)
	}
	inside := config.InterfaceOf(c.result, c.IfName)
	if inside < 0 || c.result.Interfaces[inside].Mac != device.Attrs().HardwareAddr.String() {
		return fmt.Errorf("its %s has another MAC address than libcni's cache says", c.IfName)
	}
	addresses, err := link.Addresses(container, device)
	for _, ip := range c.result.IPs {
		if address := link.PrefixOf(ip.Address); !slices.Contains(addresses, address) {
			err = errors.Join(err, fmt.Errorf("its %s does not have the address %v", c.IfName, address))
		}
	}
	return err
}

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
