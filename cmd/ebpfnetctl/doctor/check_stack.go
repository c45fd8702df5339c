package doctor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

func lookForwarding(_ context.Context, h *host) (findings []Finding, err error) {
	off, err := link.ForwardingIsOff(h.families())
	if err != nil {
		return nil, err
	}
	if !h.hasContainers() {
		return []Finding{good("on, or the first ADD turns it on")}, nil
	}
	slices.Sort(off)
	for _, name := range off {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix; and end what turns it off, such as a file in /etc/sysctl.d",
			"%s is 0: the host drops all packets from and to containers that the stack has to forward", name).by(fixRepair))
	}
	uplinks, err := h.uplinks()
	for _, name := range notForwarding(uplinks) { // somebody may have meant it
		findings = append(findings, wrong("sysctl -w "+word("net/"+name+"=1")+", if the uplink is to forward", "/proc/sys/net/%s is 0: the host drops packets that come in there", name))
	}
	for _, name := range notForwarding(h.ourDevices()) {
		findings = append(findings, wrong("doctor --fix, and end what turns it off", "/proc/sys/net/%s is 0: the host drops what the container sends", name).by(fixForwarding))
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "the host forwards packets"), nil
}

// notForwarding returns the sysctls of devices that do not forward, where the host does. For IPv6 the host's
// alone counts.
func notForwarding(devices []netlink.Link) (off []string) {
	if sysctl("ipv4/ip_forward") == "0" {
		return nil
	}
	for _, device := range devices {
		if name := "ipv4/conf/" + device.Attrs().Name + "/forwarding"; sysctl(name) == "0" {
			off = append(off, name)
		}
	}
	return off
}

// ourDevices returns the host ends of containers' devices.
func (h *host) ourDevices() (ours []netlink.Link) {
	for _, device := range h.devices {
		if h.isOurs(device) {
			ours = append(ours, device)
		}
	}
	return ours
}

func lookIPv6(_ context.Context, h *host) (findings []Finding, err error) {
	if _, ipv6 := h.families(); !ipv6 {
		return []Finding{good("no network has IPv6")}, nil
	}
	err = link.CheckIPv6()
	if errors.Is(err, link.ErrNoIPv6) {
		return []Finding{wrong("sysctl -w net.ipv6.conf.default.disable_ipv6=0 where the kernel has IPv6, or remove the IPv6 ranges",
			"new devices have no IPv6, because the kernel lacks it or net.ipv6.conf.default.disable_ipv6 is 1: ADD fails where a network has IPv6 ranges")}, nil
	}
	if err != nil {
		return nil, err
	}
	uplinks, err := h.uplinks()
	for _, uplink := range uplinks {
		name := "ipv6/conf/" + uplink.Attrs().Name + "/disable_ipv6"
		if sysctl(name) == "1" {
			findings = append(findings, warning("sysctl -w "+word("net/"+name+"=0"), "uplink %s has no IPv6: containers do not reach the outside by it", uplink.Attrs().Name))
		}
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "containers can have IPv6"), nil
}

// lookBridgeNetfilter finds bridges whose packets rules and conntrack see before they are routed.
func lookBridgeNetfilter(_ context.Context, h *host) (findings []Finding, err error) {
	uplinks, err := h.uplinks()
	for _, uplink := range uplinks {
		if text := link.BridgeNetfilter(uplink); text != "" {
			findings = append(findings, warning("sysctl -w net.bridge.bridge-nf-call-iptables=0 net.bridge.bridge-nf-call-ip6tables=0", "%s", text))
		}
	}
	ports, errPorts := h.hostPorts()
	err = errors.Join(err, errPorts)
	if sysctl("bridge/bridge-nf-call-iptables") == "1" && len(ports) > 0 {
		isUplink := func(d netlink.Link) bool {
			return slices.ContainsFunc(uplinks, func(u netlink.Link) bool { return u.Attrs().Index == d.Attrs().Index })
		}
		for _, device := range h.devices {
			if link.IsBridge(device) && h.hasPorts(device) && !isUplink(device) {
				findings = append(findings, warning("sysctl -w net.bridge.bridge-nf-call-iptables=0",
					"net.bridge.bridge-nf-call-iptables is 1: containers on bridge %s that are masqueraded get no replies from our host ports (a service proxy for that bridge may need it)", device.Attrs().Name))
			}
		}
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "br_netfilter is off, or does no harm"), nil
}

// hasPorts returns whether a bridge has ports.
func (h *host) hasPorts(bridge netlink.Link) bool {
	return slices.ContainsFunc(h.devices, func(d netlink.Link) bool { return d.Attrs().MasterIndex == bridge.Attrs().Index })
}

// lookRPFilter finds strict reverse-path filters on a host with several uplinks.
func lookRPFilter(_ context.Context, h *host) (findings []Finding, err error) {
	uplinks, err := h.uplinks()
	if err != nil {
		return nil, err
	}
	for _, uplink := range uplinks {
		name := uplink.Attrs().Name
		value := max(sysctl("ipv4/conf/all/rp_filter"), sysctl("ipv4/conf/"+name+"/rp_filter")) // the kernel takes the larger one
		if value == "1" && len(uplinks) > 1 {
			findings = append(findings, warning("sysctl -w "+word("net/ipv4/conf/"+name+"/rp_filter=2")+", which is loose",
				"rp_filter of uplink %s is strict, and the host has %d uplinks: what comes in there and would be answered by another is dropped without a counter of ours", name, len(uplinks)))
		}
	}
	return orGood(findings, "no strict rp_filter where packets may take another way back"), nil
}

func lookMTU(_ context.Context, h *host) (findings []Finding, err error) {
	mtu, err := link.OutsideMTU(h.rtnl)
	if err != nil {
		return nil, err
	}
	for _, n := range h.ours() {
		if n.config.MTU > mtu {
			findings = append(findings, warning("remove the key: then the MTU of the route is taken", "%s: mtu %d is more than the %d bytes of the route to the outside: large packets are fragmented or refused", n.name(), n.config.MTU, mtu))
		}
	}
	var large []string
	for _, device := range h.devices {
		if h.isOurs(device) && device.Attrs().MTU > mtu {
			large = append(large, fmt.Sprintf("%s (%d)", device.Attrs().Name, device.Attrs().MTU))
		}
	}
	if len(large) > 0 {
		findings = append(findings, warning("start the containers again, or restore the route's MTU",
			"the route to the outside has an MTU of %d bytes, and %s more: connections depend on ICMP errors, which many firewalls drop", mtu, list(large)))
	}
	return orGood(findings, "no container sends more than the %d bytes of the route to the outside", mtu), nil
}

// lookSubnets finds others that route the containers' addresses elsewhere, or give them out, too.
func lookSubnets(_ context.Context, h *host) (findings []Finding, err error) {
	routes, err := h.routes()
	for _, subnet := range h.subnets() {
		for _, route := range routes {
			device := h.device(route.LinkIndex)
			if device == nil || h.isOurs(device) || h.hasOursAlone(device) || !subnet.Contains(route.to.Addr()) || route.to.Bits() < subnet.Bits() || subnet.IsSingleIP() {
				continue // a shorter prefix is the way to other hosts
			}
			findings = append(findings, warning(fmt.Sprintf("give one of them another subnet, or remove %s if nobody uses it", device.Attrs().Name),
				"%s of %s is routed to %s, which is not ebpfnet's: two engines may give out one address", route.to, subnet, device.Attrs().Name))
		}
	}
	ours := h.ours()
	for i, n := range ours {
		for _, other := range ours[:i] {
			if subnet, overlaps := overlap(n, other); overlaps && n.file.List.Name != other.file.List.Name {
				findings = append(findings, wrong("give each network its own subnet", "%s and %s both have %s: a container of one gets no address that another has", other.name(), n.name(), subnet))
			}
		}
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "nobody else has the containers' subnets"), nil
}

func overlap(a, b *network) (subnet string, overlaps bool) {
	for _, one := range a.subnets() {
		for _, other := range b.subnets() {
			if one.Overlaps(other) {
				return one.String(), true
			}
		}
	}
	return "", false
}

// foreignDevice is a device that another CNI plugin makes once per host, and the types in its conflist.
var foreignDevices = []struct {
	pattern, whose string
	types          []string
}{
	{"cni[0-9]*", "bridge", []string{"bridge", "flannel"}},
	{"cni-podman*", "podman's networks", []string{"bridge"}},
	{"flannel*", "flannel", []string{"flannel"}},
	{"vxlan.calico", "Calico", []string{"calico"}},
	{"vxlan-v6.calico", "Calico", []string{"calico"}},
	{"cilium_*", "Cilium", []string{"cilium-cni"}},
	{"weave", "Weave Net", []string{"weave-net"}},
	{"kube-bridge", "kube-router", []string{"bridge"}},
	{"antrea-gw0", "Antrea", []string{"antrea"}},
}

// foreignChains are beginnings of chains that another CNI plugin makes.
var foreignChains = []struct {
	prefix, whose string
	types         []string
}{
	{"CNI-DN-", "portmap", []string{"portmap"}},
	{"FLANNEL-", "flannel", []string{"flannel"}},
	{"cali-", "Calico", []string{"calico"}},
	{"CILIUM_", "Cilium", []string{"cilium-cni"}},
	{"KUBE-ROUTER-", "kube-router", []string{"bridge"}},
	{"ANTREA-", "Antrea", []string{"antrea"}},
}

// lookLeftovers finds what other CNI plugins have left that have no configuration any more.
func lookLeftovers(ctx context.Context, h *host) (findings []Finding, err error) {
	for _, device := range h.devices {
		name := device.Attrs().Name
		for _, foreign := range foreignDevices {
			isTheirs, _ := filepath.Match(foreign.pattern, name) // the patterns are right
			if isTheirs && !h.hasPorts(device) && !h.isConfigured(foreign.types) {
				findings = append(findings, warning("ip link del "+word(name), "device %s is a leftover of %s, which has no configuration any more: its routes may lead packets astray", name, foreign.whose))
				break
			}
		}
	}
	rules := h.rules(ctx)
	for _, foreign := range foreignChains {
		if names := rules.ChainsLike(foreign.prefix); len(names) > 0 && !h.isConfigured(foreign.types) {
			findings = append(findings, warning("remove them by iptables or nft; a reboot does, too", "chains %s are leftovers of %s, which has no configuration any more: its rules may drop or translate packets", list(names), foreign.whose))
		}
	}
	return orGood(findings, "nothing of other CNI plugins that have no configuration"), nil
}

// hasOursAlone returns whether all ports of a bridge are containers that migrate has adopted.
func (h *host) hasOursAlone(bridge netlink.Link) bool {
	isOthers := func(d netlink.Link) bool {
		return d.Attrs().MasterIndex == bridge.Attrs().Index && !h.isOurs(d)
	}
	return h.hasPorts(bridge) && !slices.ContainsFunc(h.devices, isOthers)
}

// isConfigured returns whether a list of a runtime has a plugin of one of the types.
func (h *host) isConfigured(types []string) bool {
	for _, n := range h.networks {
		if n.file.List == nil {
			continue
		}
		for _, plugin := range n.file.List.Plugins {
			if slices.Contains(types, plugin.Network.Type) {
				return true
			}
		}
	}
	return false
}
