// Package migrate migrates a host from the reference plugins (bridge and ptp, with host-local and portmap) to ebpfnet and
// back.
//
// A running container is adopted: ebpfnet is attached to its veth, as by a list that has ebpfnet behind the old plugins.
// The old plugins' addresses, masquerading and host ports stay, so its connections go on. Its record has the calls of
// DEL by which the old plugins clean up, and our DEL makes these calls. So the rules of each container end with it.
//
// The order of the steps lets a migrate that was killed run again: adopt all containers; link the old list to a second
// name; rename the new list over the old name; adopt containers that were added meanwhile.
package migrate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// Options are where things are on a host.
type Options struct {
	runtimes.Options
	CacheDir string // libcni's cache
	Network  string // "": all
}

// State is what can become of a network.
type State string

// The states.
const (
	Ready   State = "ready"   // migrate does it
	Blocked State = "blocked" // something has to be done before, or forbids it
	Done    State = "done"    // it is ebpfnet's
)

// Network is a network of a runtime, and what will become of it.
type Network struct {
	Name       string          `json:"network"`
	File       string          `json:"file"`
	Plugins    []string        `json:"plugins"`
	State      State           `json:"state"`
	Reasons    []string        `json:"reasons"` // why it is blocked
	Containers []Container     `json:"containers"`
	Conflist   json.RawMessage `json:"conflist,omitempty"` // the new one
	Kept       string          `json:"kept,omitempty"`     // the file of the old one, once it is migrated

	list        *libcni.NetworkConfigList // the old one
	translation *translation
}

type host struct {
	Options
	netlink *netlink.Handle
	devices []netlink.Link
	cni     *libcni.CNIConfig
	records record.Dir
	report  func(format string, args ...any) // of each step
}

// open opens a host. The caller must call close.
func open(o Options) (*host, error) {
	records, err := record.Open(record.DefaultDir)
	if err == nil {
		o.CacheDir, err = filepath.Abs(o.CacheDir)
	}
	if err != nil {
		return nil, err
	}
	h := &host{Options: o, cni: libcni.NewCNIConfigWithCacheDir(nil, o.CacheDir, nil), records: records}
	if h.netlink, err = rtnl.Open(); err != nil {
		return nil, err
	}
	if h.devices, err = rtnl.Links(h.netlink); err != nil {
		h.close()
		return nil, err
	}
	return h, nil
}

func (h *host) close() { h.netlink.Close() }

// Plan returns the networks of this host that are, or could be, ebpfnet's. It changes nothing.
func Plan(_ context.Context, o Options) ([]*Network, error) {
	h, err := open(o)
	if err != nil {
		return nil, err
	}
	defer h.close()
	return h.networks()
}

// networks returns the networks, each once, sorted by file. An error is about what could not be read.
func (h *host) networks() (networks []*Network, err error) {
	all, err := h.Find()
	for _, r := range all {
		files, errFiles := r.Files()
		err = errors.Join(err, errFiles)
		for _, file := range files {
			isKnown := func(n *Network) bool { return n.File == file.Path }
			if file.List == nil || slices.ContainsFunc(networks, isKnown) || h.Network != "" && h.Network != file.List.Name {
				continue
			}
			n, errLook := h.look(r, file)
			if err = errors.Join(err, errLook); n != nil {
				networks = append(networks, n)
			}
		}
	}
	slices.SortFunc(networks, func(a, b *Network) int { return cmp.Compare(a.File, b.File) })
	if h.Network != "" && len(networks) == 0 && err == nil {
		err = fmt.Errorf("no network %s here that is, or could be, ebpfnet's", h.Network)
	}
	return networks, err
}

// look finds out what can become of a network. It returns nil for a network that ebpfnet neither has nor could replace.
func (h *host) look(r runtimes.Runtime, file runtimes.File) (*Network, error) {
	n := &Network{Name: file.List.Name, File: file.Path, Plugins: typesOf(file.List), State: Ready,
		Reasons: []string{}, Containers: []Container{}, list: file.List}
	if hasPlugin(file.List, config.PluginType) {
		kept := keptName(file.Path)
		if _, err := os.Stat(kept); err != nil {
			return nil, nil // it was never migrated
		}
		return h.lookAtDone(n, kept)
	}
	if filepath.Ext(file.Path) != ".conflist" {
		n.block("it is a single configuration: make it a list, in a file that ends in .conflist")
	}
	var err error
	n.translation, err = translate(file.List)
	if errors.Is(err, errOther) {
		return nil, nil
	}
	if err != nil {
		n.block("%v", err)
	} else {
		n.Conflist = n.translation.conflist
	}
	if r.Binary(config.PluginType) == "" {
		n.block("the runtime looks for plugins in %v, and %q is not there", r.BinDirs, config.PluginType)
	}
	err = h.lookAtContainers(n)
	h.lookAtBridge(n)
	if n.translation == nil {
		return n, err
	}
	return n, errors.Join(err, h.lookAtAddresses(n))
}

// lookAtDone looks at a network that was migrated. It may have containers of the old list that migrate has not seen.
func (h *host) lookAtDone(n *Network, kept string) (*Network, error) {
	var err error
	if n.list, err = libcni.NetworkConfFromFile(kept); err != nil {
		return nil, err
	}
	if n.translation, err = translate(n.list); err != nil { // --back needs nothing of it
		n.translation = &translation{chained: object{"type": config.PluginType, "antiSpoof": false}}
	}
	n.Plugins, n.Kept = typesOf(n.list), kept
	err = h.lookAtContainers(n)
	n.State = Done
	return n, err
}

func (n *Network) block(format string, args ...any) {
	n.State = Blocked
	n.Reasons = append(n.Reasons, fmt.Sprintf(format, args...))
}

// keptName is the second name of an old list. Runtimes do not read it.
func keptName(file string) string { return file + ".ebpfnet-was" }
