package link

import (
	"fmt"
	"strings"

	"github.com/vishvananda/netlink"
)

// IsBridge returns whether a device is a bridge.
func IsBridge(device netlink.Link) bool { return device.Type() == "bridge" }

// BridgeNetfilter returns what br_netfilter does to an uplink, with the remedy, or "". It
// lets rules and conntrack see what a bridge receives at the bridge's port, before the
// datapath has translated it. They see it once more afterwards, so it harms only what rules
// judge in PREROUTING. The calling thread's network namespace must be the host's.
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
