// Package conflist makes the network configuration of a node: the operator's template, which is the same on all
// nodes, with the node's own address ranges.
//
// It may import plugin/show.
package conflist

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Default is the template of an operator who has none.
//
//go:embed default.conflist
var Default []byte

// pluginType is the plugin whose keys are filled in.
const pluginType = "ebpfnet"

type object = map[string]json.RawMessage

// MaxFlows returns the key that sizes the datapath, which the agent may load before the first container: 0 if a
// template has none.
func MaxFlows(template []byte) (flows uint32, err error) {
	_, _, plugin, err := parse(template)
	if err == nil && plugin["maxFlows"] != nil {
		err = read(plugin, "maxFlows", &flows, "a number of flows")
	}
	return flows, err
}

// Node is what a conflist says of its node.
type Node struct {
	PodCIDRs []netip.Prefix
	MTU      int    // of containers; 0: that of the route to the outside
	Tunnel   bool   // some nodes are, or may be, reached by a tunnel
	State    string // path of the agent's state
}

// Fill returns a template with a node's ranges, with default routes for their families unless the template has
// routes, and with the path of the agent's state: the plugin waits for its first sync. If the template does not say, it
// gets an MTU, and packets of a usual size where there is a tunnel, because the kernel cuts longer ones for it.
// All other keys stay as they are: exemptions from masquerading, host ports, further plugins.
func Fill(template []byte, node Node) ([]byte, error) {
	list, plugins, plugin, err := parse(template)
	if err != nil {
		return nil, err
	}
	if err := fillAddresses(plugin, node.PodCIDRs); err != nil {
		return nil, err
	}
	if node.MTU != 0 && plugin["mtu"] == nil {
		plugin["mtu"] = encode(node.MTU)
	}
	if node.Tunnel && plugin["bigTCP"] == nil {
		plugin["bigTCP"] = encode("never")
	}
	plugin["cluster"] = encode(node.State)
	list["plugins"] = encode(plugins)
	filled, err := json.MarshalIndent(list, "", "  ")
	return append(filled, '\n'), err
}

// parse returns a template, its plugins, and ours among them.
func parse(template []byte) (list object, plugins []object, plugin object, err error) {
	if err := json.Unmarshal(template, &list); err != nil {
		return nil, nil, nil, fmt.Errorf("read the template of the conflist: %w", err)
	}
	var name string
	if err := errors.Join(
		read(list, "plugins", &plugins, "an array of objects"),
		read(list, "name", &name, "the network's name"),
	); err != nil {
		return nil, nil, nil, err
	}
	plugin, err = ours(plugins)
	return list, plugins, plugin, err
}

// ours returns the only plugin of our type.
func ours(plugins []object) (object, error) {
	var found []object
	for _, plugin := range plugins {
		if string(plugin["type"]) == string(encode(pluginType)) {
			found = append(found, plugin)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("plugins of the template: got %d of type %q, want one", len(found), pluginType)
	}
	return found[0], nil
}

// fillAddresses fills in the section "ipam".
func fillAddresses(plugin object, podCIDRs []netip.Prefix) error {
	section := object{"type": encode("host-local")}
	if plugin["ipam"] != nil {
		if err := read(plugin, "ipam", &section, "an object"); err != nil {
			return err
		}
	}
	var kind string
	if err := read(section, "type", &kind, `"host-local"`); err != nil {
		return err
	}
	if kind != "host-local" {
		return fmt.Errorf(`ipam.type of the template: got %s, want "host-local": it allocates from a node's podCIDRs`, show.Value(kind))
	}
	for _, key := range []string{"ranges", "subnet"} {
		if section[key] != nil {
			return fmt.Errorf("ipam.%s of the template: got %s, want none: each node has its podCIDRs", key, show.Short(string(section[key])))
		}
	}
	type rng struct {
		Subnet netip.Prefix `json:"subnet"`
	}
	type route struct {
		Dst netip.Prefix `json:"dst"`
	}
	var ranges [][]rng
	var routes []route
	sets := map[bool]int{} // by whether they are IPv4
	for _, prefix := range podCIDRs {
		i, known := sets[prefix.Addr().Is4()]
		if !known {
			i = len(ranges)
			sets[prefix.Addr().Is4()] = i
			ranges, routes = append(ranges, nil), append(routes, route{defaultOf(prefix.Addr())})
		}
		ranges[i] = append(ranges[i], rng{prefix}) // a container gets one address of each set
	}
	if len(ranges) == 0 {
		return errors.New("a conflist needs a podCIDR")
	}
	section["ranges"] = encode(ranges)
	if section["routes"] == nil {
		section["routes"] = encode(routes)
	}
	plugin["ipam"] = encode(section)
	return nil
}

// defaultOf returns the default route of an address's family.
func defaultOf(addr netip.Addr) netip.Prefix {
	if addr.Is4() {
		return netip.PrefixFrom(netip.IPv4Unspecified(), 0)
	}
	return netip.PrefixFrom(netip.IPv6Unspecified(), 0)
}

// read reads a key, which must be there.
func read(from object, key string, into any, expected string) error {
	value, found := from[key]
	if !found {
		return fmt.Errorf("%s of the template: got none, want %s", key, expected)
	}
	if json.Unmarshal(value, into) != nil {
		return fmt.Errorf("%s of the template: got %s, want %s", key, show.Short(string(value)), expected)
	}
	return nil
}

// encode is for values that have a form in JSON.
func encode(value any) json.RawMessage {
	encoded, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return encoded
}
