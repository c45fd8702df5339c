package migrate

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"

	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/config"
)

type object = map[string]any

// translation is what becomes of a list.
type translation struct {
	conflist     []byte // the new list
	ours         object // our plugin in there
	chained      object // our plugin behind the old ones, for a container that they have made
	reservations string // the directory of host-local's files, both of the old list and of the new one
}

// errOther is about a list whose plugins ebpfnet does not replace.
var errOther = errors.New("ebpfnet does not replace these plugins")

func hasPlugin(list *libcni.NetworkConfigList, plugin string) bool {
	return slices.Contains(typesOf(list), plugin)
}

func typesOf(list *libcni.NetworkConfigList) (types []string) {
	for _, plugin := range list.Plugins {
		types = append(types, plugin.Network.Type)
	}
	return types
}

// translate writes a list of ebpfnet that gives containers what an old list gave them: addresses, gateways, routes and
// capabilities. The error says what ebpfnet does not do.
func translate(list *libcni.NetworkConfigList) (*translation, error) {
	if len(list.Plugins) == 0 {
		return nil, errOther
	}
	ours, err := translateFirst(list.Plugins[0])
	if err != nil {
		return nil, err
	}
	chained := object{"type": config.PluginType, "antiSpoof": false} // the container may have addresses that are not in its result
	capabilities := object{}
	for i, plugin := range list.Plugins {
		for name, has := range plugin.Network.Capabilities {
			if has {
				capabilities[name] = true
			}
		}
		if i == 0 {
			continue
		}
		if err := merge(ours, chained, plugin); err != nil {
			return nil, err
		}
	}
	if capabilities["portMappings"] == true {
		capabilities["ips"] = true // podman drops the ports of containers with an address of their own without it
	}
	if len(capabilities) > 0 {
		ours["capabilities"] = capabilities
	}
	call, err := cni.CallOf(list.Name, list.CNIVersion, ours, skel.CmdArgs{ContainerID: "migrate", IfName: "eth0"})
	if err != nil {
		return nil, err
	}
	parsed, err := call.Parse() // refuses what ADD would refuse
	if err != nil {
		return nil, err
	}
	conflist, err := write(list, ours)
	return &translation{conflist, ours, chained, parsed.Reservations().Dir()}, err
}

func translateFirst(plugin *libcni.PluginConfig) (object, error) {
	keys, err := keysOf(plugin)
	if err != nil {
		return nil, err
	}
	switch plugin.Network.Type {
	case "ptp":
	case "bridge":
		if keys["isGateway"] != true && keys["isDefaultGateway"] != true {
			return nil, errors.New(`the bridge has no "isGateway": another machine is the containers' gateway`)
		}
	default:
		return nil, errOther
	}
	section, _ := keys["ipam"].(object)
	if section["type"] != "host-local" {
		return nil, fmt.Errorf("its addresses are of the IPAM plugin %v, whose reservations ebpfnet cannot take over; those of host-local it can", section["type"])
	}
	if keys["isDefaultGateway"] == true {
		addDefaultRoutes(section)
	}
	for _, key := range []string{"bridge", "isGateway", "isDefaultGateway", "forceAddress", "hairpinMode", "promiscMode", "preserveDefaultVlan",
		"macspoofchk", "enabledad", "ipMasqBackend", "capabilities", "name", "cniVersion"} { // without a purpose, or of the list
		delete(keys, key)
	}
	keys["type"] = config.PluginType
	return keys, nil
}

func keysOf(plugin *libcni.PluginConfig) (keys object, err error) {
	return keys, json.Unmarshal(plugin.Bytes, &keys)
}

// merge adds what a later plugin does to our configuration.
func merge(ours, chained object, plugin *libcni.PluginConfig) error {
	keys, err := keysOf(plugin)
	if err != nil {
		return err
	}
	var taken []string
	switch plugin.Network.Type {
	case "portmap":
		taken = []string{"conditionsV4", "conditionsV6"} // refused, if they ask for something
	case "bandwidth":
		taken = []string{"ingressRate", "ingressBurst", "egressRate", "egressBurst"}
		for _, key := range []string{"shapedSubnets", "unshapedSubnets"} {
			if subnets, _ := keys[key].([]any); len(subnets) > 0 {
				return fmt.Errorf("bandwidth's %q: %v: ebpfnet limits all traffic of a container: remove it from the list, or keep the list", key, subnets)
			}
		}
	case "tuning":
		taken = []string{"sysctl", "promisc", "allmulti", "txQLen", "mtu", "mac"}
	case "firewall":
		policy, _ := keys["ingressPolicy"].(string)
		if policy == "same-bridge" {
			policy = "same-network"
		}
		if policy != "" {
			ours["ingressPolicy"], chained["ingressPolicy"] = policy, policy
		}
	default:
		return fmt.Errorf("it has the plugin %q, which ebpfnet does not replace: remove it from the list, or keep the list", plugin.Network.Type)
	}
	for _, key := range taken {
		if value, ok := keys[key]; ok {
			ours[key] = value
		}
	}
	return nil
}

// addDefaultRoutes adds a default route for each family that has a range and no such route.
func addDefaultRoutes(section object) {
	ranges := []any{section}
	sets, _ := section["ranges"].([]any)
	for _, set := range sets {
		some, _ := set.([]any)
		ranges = append(ranges, some...)
	}
	routes, _ := section["routes"].([]any)
	for _, r := range ranges {
		keys, _ := r.(object)
		text, _ := keys["subnet"].(string)
		subnet, err := netip.ParsePrefix(text)
		if err != nil {
			continue // not a range, or refused later
		}
		dst := map[bool]string{true: "0.0.0.0/0", false: "::/0"}[subnet.Addr().Is4()]
		if !slices.ContainsFunc(routes, func(route any) bool { keys, _ := route.(object); return keys["dst"] == dst }) {
			routes = append(routes, object{"dst": dst})
		}
	}
	section["routes"] = routes
}

// write writes a list with one plugin in place of the others, and the other keys of the old list.
func write(list *libcni.NetworkConfigList, ours object) ([]byte, error) {
	keys := object{}
	if err := json.Unmarshal(list.Bytes, &keys); err != nil {
		return nil, err
	}
	if inlined, _ := keys["plugins"].([]any); len(inlined) != len(list.Plugins) {
		return nil, fmt.Errorf("the directory %q beside its file has more plugins: write them into the list", list.Name)
	}
	keys["plugins"] = []any{ours}
	text, err := json.MarshalIndent(keys, "", "  ")
	return append(text, '\n'), err
}
