package migrate

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
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
	i := slices.IndexFunc(h.devices, func(d netlink.Link) bool { return d.Attrs().Name == bridgeOf(n.list) })
	if i < 0 {
		return nil
	}
	return h.devices[i].Attrs()
}

// formerBridge is what a bridge was before it answered for others. A file has it until --back. Like the bridge, the file
// is gone after a reboot.
type formerBridge struct {
	Index int `json:"index"` // another bridge may have its name by now
	link.ProxyARP
}

// readFormer returns the file of a network's bridge, and what is in it, or nil where nothing was changed.
func readFormer(n *Network) (file string, former *formerBridge, err error) {
	netns, err := loader.NetnsName()
	if err != nil {
		return "", nil, err
	}
	file = filepath.Join(record.DefaultDir, netns, "migrate-"+n.Name)
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return file, nil, nil
	}
	former = &formerBridge{}
	if err == nil {
		err = json.Unmarshal(text, former)
	}
	return file, former, err
}

// keepFormer writes what a bridge is to a file.
func keepFormer(file string, bridge *netlink.LinkAttrs) error {
	present, err := link.ReadProxyARP(bridge.Name)
	if err != nil {
		return err
	}
	text, err := json.Marshal(formerBridge{bridge.Index, present})
	if err == nil {
		err = os.MkdirAll(filepath.Dir(file), 0o700)
	}
	if err != nil {
		return err
	}
	return replaceFile(file, text, 0o600)
}

// answerForOthers makes the bridge of a network answer at once for containers that are not on it.
func (h *host) answerForOthers(n *Network) error {
	bridge := h.deviceOf(n)
	if bridge == nil {
		return nil
	}
	file, former, err := readFormer(n)
	if err == nil && (former == nil || former.Index != bridge.Index) {
		err = keepFormer(file, bridge)
	}
	if err != nil {
		return err
	}
	return link.ProxyARP{Answers: "1", Delay: "0"}.Set(bridge.Name)
}

// answerAsBefore undoes answerForOthers.
func (h *host) answerAsBefore(n *Network) error {
	file, former, err := readFormer(n)
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

// isIPv6 reports whether a container with an address looks for others by neighbor discovery.
func isIPv6(address string) bool { return strings.Contains(address, ":") }
