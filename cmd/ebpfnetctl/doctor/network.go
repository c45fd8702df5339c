package doctor

import (
	"encoding/json"
	"fmt"
	"net/netip"

	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/runtimes"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/config"
)

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
