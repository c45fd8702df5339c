package migrate

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// Containers that are adopted stay on their bridge. They look there for all addresses of their subnet, also for
// those of containers that ebpfnet makes, which are not there. For IPv4 the bridge can answer in their place
// (proxy ARP): then the host forwards, as it does for new containers. For IPv6 the kernel would have to be told
// each of their addresses.

// lookAtBridge blocks a network whose bridge has a port that is none of its containers': they share their LAN
// with whatever is behind it.
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

// deviceOf returns the bridge of a network, or nil.
func (h *host) deviceOf(n *Network) *netlink.LinkAttrs {
	name := bridgeOf(n.list)
	for _, device := range h.devices {
		if name != "" && device.Attrs().Name == name {
			return device.Attrs()
		}
	}
	return nil
}

// formerBridge is what a bridge was before it answered for others. A file has it, until --back: like the bridge, it is
// gone after a reboot.
type formerBridge struct {
	Index int `json:"index"` // another one may have its name by now
	link.ProxyARP
}

// formerFile is the file of a network's bridge.
func formerFile(n *Network) (string, error) {
	netns, err := loader.NetnsName()
	return filepath.Join(record.DefaultDir, netns, "migrate-"+n.Name), err
}

// readFormer returns nil where nothing was changed.
func readFormer(file string) (*formerBridge, error) {
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	former := &formerBridge{}
	if err == nil {
		err = json.Unmarshal(text, former)
	}
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", file, err)
	}
	return former, nil
}

// keepFormer writes what a bridge is, unless the file has what it was.
func keepFormer(file string, bridge *netlink.LinkAttrs) error {
	former, err := readFormer(file)
	if err != nil || former != nil && former.Index == bridge.Index {
		return err
	}
	present, err := link.ReadProxyARP(bridge.Name)
	if err != nil {
		return err
	}
	text, err := json.Marshal(formerBridge{bridge.Index, present})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
		return err
	}
	if err := writeFile(partialName(file), text, 0o600); err != nil {
		return err
	}
	return rename(partialName(file), file)
}

// answerForOthers has the bridge of a network answer at once for containers that are not on it.
func (h *host) answerForOthers(n *Network) error {
	bridge := h.deviceOf(n)
	if bridge == nil {
		return nil
	}
	file, err := formerFile(n)
	if err == nil {
		err = keepFormer(file, bridge)
	}
	if err != nil {
		return err
	}
	return link.ProxyARP{Answers: "1", Delay: "0"}.Set(bridge.Name)
}

// answerAsBefore undoes answerForOthers.
func (h *host) answerAsBefore(n *Network) error {
	file, err := formerFile(n)
	if err != nil {
		return err
	}
	former, err := readFormer(file)
	if err != nil || former == nil {
		return err
	}
	if bridge := h.deviceOf(n); bridge != nil && bridge.Index == former.Index {
		if err := former.Set(bridge.Name); err != nil {
			return err
		}
	}
	return os.Remove(file)
}

// hasIPv6 says whether the container looks for others by neighbor discovery.
func (c *Container) hasIPv6() bool {
	return slices.ContainsFunc(c.result.IPs, func(ip *types100.IPConfig) bool { return ip.Address.IP.To4() == nil })
}
