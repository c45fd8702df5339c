// Package conflist fills a node's address ranges into the operator's template, which is the same on all nodes. The result
// is the node's network configuration.
package conflist

import (
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// Default is the template for operators without their own.
//
//go:embed default.conflist
var Default []byte

type object = map[string]json.RawMessage

// MaxFlows returns the template's key maxFlows, or 0. It sizes the datapath, which the agent may load before the first ADD.
func MaxFlows(template []byte) (flows uint32, err error) {
	_, _, plugin, err := parse(template)
	if err == nil && plugin["maxFlows"] != nil {
		err = read(plugin, "maxFlows", &flows, "a number of flows")
	}
	return flows, err
}

// Node has the values that differ between nodes.
type Node struct {
	PodCIDRs []netip.Prefix
	MTU      int    // of containers; 0: the MTU of the route to the outside
	Tunnel   bool   // other nodes may be reached by a tunnel
	State    string // path of the agent's state
}

// Fill returns the template with the node's ranges and the path of the agent's state: the plugin waits for the agent's
// first sync. Unless the template has its own, it adds default routes, an MTU and, for a tunnel, bigTCP never, because the
// kernel cuts larger packets for a tunnel. All other keys stay as they are.
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

// parse returns the template, its plugins, and the plugin ebpfnet among them.
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
		if string(plugin["type"]) == string(encode(config.PluginType)) {
			found = append(found, plugin)
		}
	}
	if len(found) != 1 {
		return nil, fmt.Errorf("plugins of the template: got %d of type %q, want one", len(found), config.PluginType)
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

// read reads a required key.
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

// encode panics for values that have no form in JSON.
func encode(value any) json.RawMessage {
	encoded, err := json.Marshal(value)
	if err != nil {
		panic(err)
	}
	return encoded
}
