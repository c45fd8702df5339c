package migrate

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/utils"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Fate is what becomes of a container.
type Fate string

// The fates.
const (
	Adopt   Fate = "adopt"   // it goes on, and so do its connections
	Adopted Fate = "adopted" // that has been done
	Restart Fate = "restart" // it has to be stopped before
)

// Container is a running container of an old network.
type Container struct {
	maps.Attachment
	Fate      Fate     `json:"fate"`
	Device    string   `json:"device"` // the host's end of its veth
	Addresses []string `json:"addresses"`
	HostPorts []string `json:"hostPorts"` // which portmap serves until it ends

	attached bool // to ebpfnet; if it is not adopted, a migrate was killed
	cached   *libcni.NetworkAttachment
	result   *types100.Result
}

// lookAtContainers finds the containers of a network that run, by libcni's cache. What the cache says of a
// container counts only if it is true.
func (h *host) lookAtContainers(n *Network) error {
	all, err := h.cni.GetCachedAttachments("")
	if err != nil {
		return fmt.Errorf("read libcni's cache: %w", err)
	}
	for _, cached := range all {
		if cached.Network != n.Name {
			continue
		}
		c, err := h.lookAtContainer(cached)
		if err != nil {
			n.block("container %s: %v", cached.ContainerID, err)
		}
		if c == nil {
			continue
		}
		if err != nil {
			c.Fate = Restart
		}
		if c.Fate == Adopt && bridgeOf(n.list) != "" && c.hasIPv6() {
			c.Fate = Restart
			n.block("container %s has IPv6, and runs on a bridge: there it would look in vain for new containers, which have addresses of its subnet; "+
				"stop it, and start it again afterwards", c.ContainerID)
		}
		n.Containers = append(n.Containers, *c)
	}
	return nil
}

// lookAtAddresses blocks a network that has a container of which libcni's cache does not know: it has a
// reservation, and the host a route to its veth.
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
			if device.Attrs().Index == routes[0].LinkIndex && device.Type() == "veth" {
				n.block("the address %v is in use behind %s, by a container that libcni's cache does not know: stop it", addr, device.Attrs().Name)
			}
		}
	}
	return err
}

// lookAtContainer returns nil for a container that is gone, and for one that ebpfnet has made.
func (h *host) lookAtContainer(cached *libcni.NetworkAttachment) (*Container, error) {
	if err := checkNames(cached); err != nil {
		return nil, err
	}
	list, err := libcni.NetworkConfFromBytes(cached.Config)
	if err != nil || len(list.Plugins) == 0 {
		return nil, errors.Join(errors.New("libcni's cache has no valid list"), err)
	}
	if list.Plugins[0].Network.Type == pluginType {
		return nil, nil
	}
	rt := &libcni.RuntimeConf{ContainerID: cached.ContainerID, IfName: cached.IfName}
	given, err := h.cni.GetNetworkListCachedResult(list, rt)
	if err != nil || given == nil {
		return nil, errors.Join(errors.New("libcni's cache has no valid result"), err)
	}
	c := &Container{Attachment: maps.Attachment{Network: cached.Network, ContainerID: cached.ContainerID, IfName: cached.IfName},
		Fate: Adopt, Addresses: []string{}, HostPorts: portsOf(cached), cached: cached}
	if isOf(list, pluginType) {
		c.Fate = Adopted
	}
	if c.result, err = types100.NewResultFromResult(given); err != nil {
		return nil, err
	}
	device, ns, err := h.find(c.result)
	if device == nil || err != nil {
		return nil, err
	}
	defer ns.Close()
	if c.attached, err = isAttached(c); err != nil {
		return nil, err
	}
	c.Device = device.Attrs().Name
	for _, ip := range c.result.IPs {
		c.Addresses = append(c.Addresses, ip.Address.IP.String())
	}
	return c, c.isTrue(ns)
}

// isAttached returns whether ebpfnet works on a container that other plugins have made.
func isAttached(c *Container) (bool, error) {
	records, err := record.Open(record.DefaultDir)
	if err != nil {
		return false, err
	}
	rec, err := records.Read(c.Owner())
	return rec != nil && rec.Chained != nil, err
}

// checkNames refuses names that the specification does not allow: they become parts of the names of files.
func checkNames(cached *libcni.NetworkAttachment) error {
	if err := utils.ValidateContainerID(cached.ContainerID); err != nil {
		return err
	}
	if err := utils.ValidateNetworkName(cached.Network); err != nil {
		return err
	}
	if err := utils.ValidateInterfaceName(cached.IfName); err != nil {
		return err
	}
	return nil
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

// isTrue compares the container's interface with the result: nobody else's may have the name by now.
func (c *Container) isTrue(ns netns.NsHandle) error {
	container, err := rtnl.OpenAt(ns)
	if err != nil {
		return err
	}
	defer container.Close()
	device, err := link.Find(container, c.IfName)
	if err != nil || device == nil {
		return errors.Join(fmt.Errorf("it has no %s any more", c.IfName), err)
	}
	inside := slices.IndexFunc(c.result.Interfaces, func(i *types100.Interface) bool { return i.Sandbox != "" && i.Name == c.IfName })
	if inside < 0 || c.result.Interfaces[inside].Mac != device.Attrs().HardwareAddr.String() {
		return fmt.Errorf("its %s has another MAC address than libcni's cache says", c.IfName)
	}
	addresses, err := link.Addresses(container, device)
	for _, ip := range c.result.IPs {
		if wanted := link.PrefixOf(ip.Address); !slices.Contains(addresses, wanted) {
			err = errors.Join(err, fmt.Errorf("its %s does not have the address %v", c.IfName, wanted))
		}
	}
	return err
}

// portsOf returns the host ports that a runtime has asked for, whatever the case of its keys.
func portsOf(cached *libcni.NetworkAttachment) []string {
	ports := []string{}
	mappings, _ := cached.CapabilityArgs["portMappings"].([]any)
	for _, mapping := range mappings {
		keys, _ := mapping.(object)
		value := func(name string) string {
			for key, value := range keys {
				if strings.EqualFold(key, name) {
					return fmt.Sprint(value)
				}
			}
			return ""
		}
		ports = append(ports, value("hostPort")+"/"+value("protocol"))
	}
	return ports
}
