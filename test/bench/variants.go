package main

import (
	"encoding/json"
	"net/netip"
	"slices"
)

// variant is a way to connect pods.
type variant struct {
	name  string
	title string
	// plugins are the network's; without any, the pods are the two ends of a veth.
	plugins []plugin
	// routed variants have no NAT: the outside host has routes to pods and uses their addresses.
	routed bool
	// bigTCP raises the sizes of a bare veth, or of the uplink before ADD.
	bigTCP bool
	// redirect puts a minimal program that redirects between two veths.
	redirect bool
	// streams variants differ from another one in streams only.
	streams bool
	// ours are variants of ebpfnet. One that the binary refuses is absent, with the reason.
	ours bool
	// reference variants use the reference plugins.
	reference bool
	// slow variants take seconds for an ADD, so they get fewer of them and one scale.
	slow bool
	// join lets a node's pods reach another's; variants with it have two nodes, with a pod each.
	join func(n, other node) error
	// rules are the node's beside the plugin's, or nil.
	rules *ruleset
	// named variants are measured only if an option names them.
	named bool
	// policy variants have pods with the key policy.
	policy bool
	// insteadOf is a variant with the same behavior: this one is set up only if that is absent.
	insteadOf string
}

// plugin is an element of a configuration list.
type plugin map[string]any

const (
	bareName  = "bare"
	plainName = "plain"
	neverName = "ebpfnet-never"
	// bareBigName is a bare veth with the packet sizes of ourBigName.
	bareBigName = "bare-big"
	ourBigName  = "ebpfnet-big"
	// redirectName is the minimal cost of programs.
	redirectName = "redirect"
	// bridgeName is the reference for ADD.
	bridgeName = "bridge-iptables"
	ptpName    = "ptp-iptables"

	establishedName = "ebpfnet-established"
	alwaysName      = "ebpfnet-always"
	autoName        = "ebpfnet-auto" // the default, here without rules of the host

	// Between nodes.
	routesName  = "nodes-routes"
	kindnetName = "nodes-kindnet"
	// kindnetSlowName is kindnetName on a kernel without flowtables.
	kindnetSlowName = "nodes-kindnet-slow"
	flannelName     = "nodes-flannel"
	directName      = "nodes-direct"
	directAutoName  = "nodes-direct-auto"
	tunnelName      = "nodes-tunnel"
)

// judged are the variants that targets are for.
var judged = []string{establishedName, alwaysName, autoName, "ebpfnet"}

var variants = slices.Concat(
	plainVariants, withRules(rulesets, variantsOf(ptpName, bridgeName, establishedName)), serviceVariants(), policyVariants(),
)

var plainVariants = []variant{
	{name: bareName, title: "bare veth"},
	{name: bareBigName, title: "bare veth, BIG TCP sizes", bigTCP: true, streams: true},
	{name: redirectName, title: "minimal redirecting program", redirect: true},
	{name: plainName, title: "plain routing, no NAT", routed: true, plugins: []plugin{{"type": "ptp"}}},
	{name: bridgeName, title: "bridge + portmap (iptables)", reference: true, plugins: reference("bridge", "iptables")},
	{name: "bridge-nftables", title: "bridge + portmap (nftables)", reference: true, plugins: reference("bridge", "nftables")},
	{name: ptpName, title: "ptp + portmap (iptables)", reference: true, plugins: reference("ptp", "iptables"), slow: true},
	{name: "ptp-nftables", title: "ptp + portmap (nftables)", reference: true, plugins: reference("ptp", "nftables"), slow: true},
	{name: neverName, title: "ebpfnet, fastPath never", plugins: ebpfnet("never"), ours: true},
	{name: establishedName, title: "ebpfnet, fastPath established", plugins: ebpfnet("established"), ours: true},
	{name: alwaysName, title: "ebpfnet, fastPath always", plugins: ebpfnet("always"), ours: true},
	{name: autoName, title: "ebpfnet, fastPath auto", plugins: ebpfnet("auto"), ours: true},
	{name: "ebpfnet-netkit", title: "ebpfnet, netkit", plugins: withNetkit("established"), ours: true},
	{name: "ebpfnet-netkit-always", title: "ebpfnet, netkit, fastPath always", plugins: withNetkit("always"), ours: true},
	{name: ourBigName, title: "ebpfnet, BIG TCP sizes", plugins: ebpfnet("established"), ours: true, bigTCP: true, streams: true},
	{name: "ebpfnet", title: "ebpfnet", plugins: ebpfnet("established"), ours: true, insteadOf: establishedName},
	{name: routesName, title: "plain routes between nodes", plugins: []plugin{{"type": "ptp"}}, join: joinByRoutes},
	{name: kindnetName, title: "kindnet's objects", plugins: []plugin{{"type": "ptp"}}, join: joinAsKindnet},
	{name: kindnetSlowName, title: "kindnet's objects without flowtable", plugins: []plugin{{"type": "ptp"}}, join: joinWithoutFlowtable},
	{name: flannelName, title: "flannel's objects", plugins: flannelBridge(), join: joinAsFlannel},
	{name: directName, title: "ebpfnet, mode direct", plugins: ebpfnet("established"), ours: true, join: joinDirectly},
	{name: directAutoName, title: "ebpfnet, mode direct, fastPath auto", plugins: ebpfnet("auto"), ours: true, join: joinDirectly},
	{name: tunnelName, title: "ebpfnet, mode tunnel", plugins: inTunnel(), ours: true, join: joinByTunnel},
}

// variantsOf returns the variants without rules that have these names.
func variantsOf(names ...string) (all []variant) {
	for _, v := range plainVariants {
		if slices.Contains(names, v.name) {
			all = append(all, v)
		}
	}
	return all
}

// variantTitle returns the title of a variant.
func variantTitle(name string) string {
	for _, v := range variants {
		if v.name == name {
			return v.title
		}
	}
	return name
}

func reference(main, backend string) []plugin {
	return []plugin{
		{"type": main, "isGateway": true, "ipMasq": true, "ipMasqBackend": backend},
		{"type": "portmap", "backend": backend, "capabilities": map[string]bool{"portMappings": true}},
	}
}

func ebpfnet(fastPath string) []plugin {
	p := plugin{"type": "ebpfnet", "ipMasq": true, "capabilities": map[string]bool{"portMappings": true}}
	if fastPath != "" {
		p["fastPath"] = fastPath
	}
	return []plugin{p}
}

func withNetkit(fastPath string) []plugin {
	plugins := ebpfnet(fastPath)
	plugins[0]["device"] = "netkit"
	return plugins
}

func inTunnel() []plugin {
	plugins := ebpfnet("established")
	plugins[0]["mtu"], plugins[0]["bigTCP"] = tunnelMTU, "never"
	return plugins
}

// podSubnets are the IPv4 and IPv6 subnets of a node without others.
var podSubnets = [2]netip.Prefix{netip.MustParsePrefix("10.88.0.0/16"), netip.MustParsePrefix("fd00:88::/64")}

// conflist returns the network configuration list of a node. dataDir keeps its reserved addresses,
// because all nodes share the file system.
func (p plannedSetup) conflist(subnets [2]netip.Prefix, dataDir string) ([]byte, error) {
	list := make([]plugin, 0, len(p.plugins))
	for i, one := range p.plugins {
		whole := plugin{}
		for key, value := range one {
			whole[key] = value
		}
		if i == 0 {
			whole["ipam"] = map[string]any{
				"type":    "host-local",
				"ranges":  []any{[]any{map[string]any{"subnet": subnets[0]}}, []any{map[string]any{"subnet": subnets[1]}}},
				"routes":  []any{map[string]string{"dst": "0.0.0.0/0"}, map[string]string{"dst": "::/0"}},
				"dataDir": dataDir,
			}
		}
		if p.ours && p.Flows > smallest.Flows {
			whole["maxFlows"] = 4 * max(p.Flows, minFlows) // one container opens all, and gets at most 12 of 16 places of a bucket
		}
		list = append(list, whole)
	}
	return json.Marshal(map[string]any{"cniVersion": "1.0.0", "name": "pods", "plugins": list})
}

// setupName returns the unique name of a setup.
func setupName(variant, uplink string, s scale) string {
	name := variant
	if uplink != "" {
		name += "/" + uplink
	}
	if s != smallest {
		name += "/" + s.name()
	}
	return name
}
