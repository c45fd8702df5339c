package doctor

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/containers"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// host is what several checks need to know. What could not be found out is missing, and the check that
// looks for it reports the error.
type host struct {
	Options
	rtnl    *netlink.Handle
	devices []netlink.Link

	datapath    *loader.Datapath // nil: not loaded, or not to be opened
	errDatapath error
	admin       *admin.Host // nil as well
	attachments []*admin.Attachment
	errAttached error

	runtimes    []runtimes.Runtime
	errRuntimes error
	networks    []*network
}

func newHost(options Options) (*host, error) {
	h := &host{Options: options}
	var err error
	if h.rtnl, err = rtnl.Open(); err != nil {
		return nil, err
	}
	if h.devices, err = link.List(h.rtnl); err != nil {
		h.close()
		return nil, err
	}
	if h.datapath, h.errDatapath = loader.OpenLoaded(); h.errDatapath == nil {
		h.admin, h.errAttached = admin.Open(loader.OpenLoaded, options.DataDir)
		var errList error
		h.attachments, errList = containers.Attachments(options.DataDir, options.CacheDir)
		h.errAttached = errors.Join(h.errAttached, errList)
	}
	h.runtimes, h.errRuntimes = h.Find()
	for _, r := range h.runtimes {
		networks, err := networksOf(r)
		h.errRuntimes = errors.Join(h.errRuntimes, err)
		h.networks = append(h.networks, networks...)
	}
	return h, nil
}

func (h *host) close() {
	if h.datapath != nil {
		h.datapath.Close()
	}
	if h.admin != nil {
		h.admin.Close()
	}
	h.rtnl.Close()
}

// whyNotOpen returns an error if a datapath is loaded, and it, its devices or its records cannot be opened.
func (h *host) whyNotOpen() error {
	switch {
	case errors.Is(h.errDatapath, loader.ErrNotLoaded), h.admin != nil:
		return nil
	case h.errDatapath == nil:
		return h.errAttached
	}
	return errors.New("what is loaded cannot be opened: see the check datapath")
}

// ours returns the networks with a valid configuration of ebpfnet, each once.
func (h *host) ours() (found []*network) {
	for _, n := range h.networks {
		isSame := func(other *network) bool { return other.file.Path == n.file.Path }
		if n.config != nil && !slices.ContainsFunc(found, isSame) {
			found = append(found, n)
		}
	}
	return found
}

// subnets returns the subnets of containers: those of networks, and an address of each network that has
// others.
func (h *host) subnets() (subnets []netip.Prefix) {
	for _, n := range h.ours() {
		subnets = append(subnets, n.subnets()...)
	}
	configured := subnets
	type sample struct {
		network string
		isIPv4  bool
	}
	seen := map[sample]bool{}
	for _, a := range h.attachments {
		for _, address := range a.Addresses {
			contains := func(p netip.Prefix) bool { return p.Contains(address.Address) }
			one := sample{a.Network, address.Address.Is4()}
			if !seen[one] && !slices.ContainsFunc(configured, contains) {
				seen[one] = true
				subnets = append(subnets, netip.PrefixFrom(address.Address, address.Address.BitLen()))
			}
		}
	}
	slices.SortFunc(subnets, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return slices.Compact(subnets)
}

// families returns the families that containers have, or will have.
func (h *host) families() (ipv4, ipv6 bool) {
	for _, subnet := range h.subnets() {
		ipv4, ipv6 = ipv4 || subnet.Addr().Is4(), ipv6 || subnet.Addr().Is6()
	}
	return ipv4, ipv6
}

func (h *host) hasContainers() bool {
	return slices.ContainsFunc(h.attachments, func(a *admin.Attachment) bool { return !a.Dead })
}

// uplinks returns the uplinks. Before the first ADD there are none.
func (h *host) uplinks() ([]netlink.Link, error) {
	if h.admin == nil {
		return nil, h.errAttached
	}
	return h.admin.Uplinks()
}

// path returns where a file of the host is.
func (h *host) path(file string) string { return filepath.Join("/", h.Root, file) }

// sysctl returns a value below /proc/sys/net, or "" where the kernel has no such thing.
func sysctl(name string) string {
	text, _ := os.ReadFile("/proc/sys/net/" + name)
	return strings.TrimSpace(string(text))
}

// network is a list in a runtime's directory.
type network struct {
	runtime runtimes.Runtime
	file    runtimes.File
	isTaken bool           // by the runtime
	hasOurs bool           // has our plugin
	config  *config.Config // of our plugin; nil where it has none, or not a valid one
	err     error          // of our plugin's configuration
	keys    map[string]any // of our plugin's configuration
}

// networksOf returns the lists that a runtime sees, valid or not.
func networksOf(r runtimes.Runtime) (networks []*network, err error) {
	files, err := r.Files()
	taken := r.Takes(files)
	for i, file := range files {
		n := &network{runtime: r, file: file, isTaken: taken == &files[i]}
		n.parse()
		networks = append(networks, n)
	}
	return networks, err
}

// parse parses the configuration of our plugin as an ADD without arguments would.
func (n *network) parse() {
	if n.file.List == nil {
		return
	}
	for _, plugin := range n.file.List.Plugins {
		if plugin.Network.Type != config.PluginType {
			continue
		}
		n.hasOurs = true
		if n.err = json.Unmarshal(plugin.Bytes, &n.keys); n.err != nil {
			return
		}
		call, err := n.call()
		if n.err = err; err == nil {
			n.config, n.err = call.Parse()
		}
	}
}

// call is a call of our plugin for this network.
func (n *network) call() (*cni.Call, error) {
	return cni.CallOf(n.file.List.Name, n.file.List.CNIVersion, n.keys, skel.CmdArgs{ContainerID: "doctor", IfName: "eth0"})
}

// name names a list in a message.
func (n *network) name() string {
	if n.file.List == nil {
		return n.file.Path
	}
	return fmt.Sprintf("network %s (%s)", n.file.List.Name, n.file.Path)
}

// subnets returns the subnets that containers get addresses of, as far as our configuration says.
func (n *network) subnets() (subnets []netip.Prefix) {
	if n.config == nil || n.config.IPAM == nil {
		return nil
	}
	return n.config.IPAM.Subnets()
}
