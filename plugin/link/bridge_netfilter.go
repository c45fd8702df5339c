package link

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// IsBridge reports whether a device is a bridge.
func IsBridge(device netlink.Link) bool { return device.Type() == "bridge" }

// BridgeNetfilter describes how br_netfilter affects an uplink, with the remedy, or returns "". It shows packets that a
// bridge receives to rules and conntrack at the bridge's port, before the datapath translates them. Rules see the
// packets again afterwards, so only rules in PREROUTING are affected. The calling thread's network namespace must be
// the host's.
func BridgeNetfilter(uplink netlink.Link) string {
	if !IsBridge(uplink) {
		return ""
	}
	var on []string
	for _, name := range []string{"bridge/bridge-nf-call-iptables", "bridge/bridge-nf-call-ip6tables"} {
		if value, err := readSysctl(name); err == nil && value == "1" { // else br_netfilter is not loaded
			on = append(on, "net."+strings.ReplaceAll(name, "/", "."))
		}
	}
	if len(on) == 0 {
		return ""
	}
	return fmt.Sprintf("uplink %s is a bridge, and br_netfilter shows its packets to rules in PREROUTING before they are translated: "+
		"rules there that drop ct state invalid drop replies to containers: set %s to 0, or accept what comes by the bridge's ports before them",
		uplink.Attrs().Name, strings.Join(on, " and "))
}
