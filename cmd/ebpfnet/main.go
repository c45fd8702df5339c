// Command ebpfnet is the CNI plugin. A container runtime executes it; README.md says how to install
// it.
package main

import (
	_ "embed"

	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
)

// example is the configuration that README.md shows and the demo runs.
//
//go:embed example.conflist
var example string

const about = `ebpfnet is a CNI plugin: it connects containers with a veth pair and eBPF programs, without a bridge,
without iptables or nftables rules and without a daemon. Container runtimes execute it. Install it in
/opt/cni/bin, with a network configuration list like this one in /etc/cni/net.d:

`

func main() { cni.Run(plugin.New(), "ebpfnet", about+example) }
