package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/pflag"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// commandUninstall removes everything from this host.
const commandUninstall = "uninstall"

type options struct {
	desired.Config
	node       string
	kubeconfig string
	apiServer  string
	template   string
	conflist   string
	state      string
	probePort  int
	listen     string
	binDir     string
	command    string // "": run
	stay       bool

	networkPolicy bool
	policyGrace   time.Duration
	logDenied     uint32
}

// parseOptions returns pflag.ErrHelp after it has printed the help.
func parseOptions(args []string) (*options, error) {
	o := &options{}
	flags := pflag.NewFlagSet("ebpfnet-node", pflag.ContinueOnError)
	flags.SortFlags = false
	flags.Usage = func() {
		fmt.Fprintf(flags.Output(), "Usage: ebpfnet-node [FLAGS] [uninstall]\n\n"+
			"The agent of a node: it writes routes to other nodes' containers and this node's conflist. \"uninstall\" removes all of\n"+
			"ebpfnet from this host.\n\nFlags:\n%s", flags.FlagUsages())
	}
	flags.StringVar(&o.node, "node", os.Getenv("NODE_NAME"), "name of this node's `NODE` object (default: $NODE_NAME)")
	flags.StringVar((*string)(&o.Mode), "mode", string(desired.ModeTunnel), "how to reach other nodes: tunnel, direct or auto")
	flags.StringVar(&o.Device, "device", "ebpfnet0", "name of the tunnel `DEVICE`")
	flags.IntVar(&o.Port, "port", 4789, "UDP `PORT` of VXLAN, the same on all nodes")
	flags.IntVar(&o.probePort, "probe-port", 9910, "UDP `PORT` of probes in mode auto, the same on all nodes")
	flags.Uint32Var(&o.VNI, "vni", 1, "VXLAN network `ID`, the same on all nodes")
	flags.IntVar(&o.MTU, "mtu", 0, "`MTU` between nodes (default: MTU of the device with this node's address)")
	flags.BoolVar(&o.PreferIPv6, "prefer-ipv6", false, "tunnel over IPv6 between nodes that have both families; the same on all nodes")
	podCIDRs := flags.StringSlice("cluster-cidr", nil, "`PREFIX` that contains all nodes' podCIDRs; others are refused (default: any)")
	flags.StringVar(&o.kubeconfig, "kubeconfig", "", "`FILE` with the API server's address (default: the service account's)")
	flags.StringVar(&o.apiServer, "api-server", "", "`URL` of the API server, if its service does not work yet")
	flags.StringVar(&o.template, "template", "", "`FILE` with the conflist without ranges (default: one with masquerading and host ports)")
	flags.StringVar(&o.conflist, "conflist", "/etc/cni/net.d/10-ebpfnet.conflist", "`FILE` to write")
	flags.StringVar(&o.state, "state", nodestate.Default, "`FILE` to write for the plugin, on a file system that a reboot empties")
	flags.BoolVar(&o.networkPolicy, "network-policy", false, "enforce NetworkPolicy")
	flags.DurationVar(&o.policyGrace, "policy-grace", 15*time.Minute, "`TIME` without the agent after which pods of all namespaces wait for it")
	flags.Uint32Var(&o.logDenied, "log-denied", 0, "print a line of JSON for each connection that rules of containers refuse, at most `N` per second (default: none)")
	flags.StringVar(&o.binDir, "bin-dir", "", "`DIR` to copy the plugins to, from the directory of this program (default: none)")
	flags.BoolVar(&o.stay, "stay", false, "with uninstall: wait until no container is left, and then for a signal")
	flags.StringVar(&o.listen, "listen", "127.0.0.1:9909", "`ADDRESS:PORT` of /healthz, /readyz and /metrics")
	if err := flags.Parse(args); err != nil {
		return nil, err
	}
	if o.command = flags.Arg(0); flags.NArg() > 1 || o.command != "" && o.command != commandUninstall {
		return nil, fmt.Errorf("got arguments %s, want none or uninstall", show.Value(flags.Args()))
	}
	for _, text := range *podCIDRs {
		prefix, err := netip.ParsePrefix(text)
		if err != nil || prefix != prefix.Masked() || prefix.Addr().Is4In6() {
			return nil, invalid("cluster-cidr", text, "a prefix such as 10.244.0.0/16")
		}
		o.PodCIDRs = append(o.PodCIDRs, prefix)
	}
	return o, o.check()
}

func invalid(flag string, value any, expected string) error {
	return fmt.Errorf("--%s: got %s, want %s", flag, show.Value(value), expected)
}

func (o *options) check() error {
	const (
		maxPort, maxVNI    = 1<<16 - 1, 1<<24 - 1
		minMTU, largestMTU = 576, 65535
		maxNameLen         = 15 // IFNAMSIZ and its NUL
	)
	_, _, listenErr := net.SplitHostPort(o.listen)
	switch {
	case o.node == "" && o.command == "":
		return errors.New("--node: got none, want the name of this node's object, or NODE_NAME in the environment")
	case !slices.Contains([]desired.Mode{desired.ModeTunnel, desired.ModeDirect, desired.ModeAuto}, o.Mode):
		return invalid("mode", o.Mode, "tunnel, direct or auto")
	case o.Device == "" || len(o.Device) > maxNameLen:
		return invalid("device", o.Device, "1 to 15 characters")
	case o.Port < 1 || o.Port > maxPort:
		return invalid("port", o.Port, "1 to 65535")
	case o.probePort < 1 || o.probePort > maxPort:
		return invalid("probe-port", o.probePort, "1 to 65535")
	case o.VNI > maxVNI:
		return invalid("vni", o.VNI, "0 to 16777215")
	case o.MTU != 0 && (o.MTU < minMTU || o.MTU > largestMTU):
		return invalid("mtu", o.MTU, "0, or 576 to 65535")
	case filepath.Ext(o.conflist) != ".conflist":
		return invalid("conflist", o.conflist, "a file that ends in .conflist")
	case !filepath.IsAbs(o.state):
		return invalid("state", o.state, "an absolute path")
	case o.policyGrace < 2*interval:
		return invalid("policy-grace", o.policyGrace, "2m or more")
	case listenErr != nil:
		return invalid("listen", o.listen, "ADDRESS:PORT")
	}
	return nil
}
