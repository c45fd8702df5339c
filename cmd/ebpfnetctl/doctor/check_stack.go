package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/firewall"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/names"
)

func lookForwarding(_ context.Context, h *host) (findings []Finding, err error) {
	findings, err = h.lookIPv6()
	off, errOff := link.ForwardingIsOff(h.families())
	if err = errors.Join(err, errOff); err != nil {
		return findings, err
	}
	if !h.hasContainers() {
		return orGood(findings, "on, or the first ADD turns it on"), nil
	}
	slices.Sort(off)
	for _, name := range off {
		findings = append(findings, wrong("ebpfnetctl repair, or doctor --fix; and end what turns it off, such as a file in /etc/sysctl.d",
			"%s is 0: the host drops all packets from and to containers that the stack has to forward", name).by(&fixByRepair))
	}
	uplinks, err := h.uplinks()
	for _, name := range notForwarding("ipv4/ip_forward", "ipv4/conf/%s/forwarding", append(h.ourDevices(), uplinks...)) { // somebody may have meant it
		findings = append(findings, wrong("sysctl -w "+word("net/"+name+"=1")+", and end what turns it off", "/proc/sys/net/%s is 0: the host drops packets that come in there", name))
	}
	// The host forwards IPv6 whatever the device's setting is, but route lookups of programs fail.
	for _, name := range notForwarding("ipv6/conf/all/forwarding", "ipv6/conf/%s/forwarding", h.ourDevices()) {
		if _, ipv6 := h.families(); !ipv6 {
			break
		}
		findings = append(findings, warning("sysctl -w "+word("net/"+name+"=1")+", and end what turns it off", "/proc/sys/net/%s is 0: packets do not bypass the host's stack, and egress rules refuse them", name))
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "the host forwards packets"), nil
}

// notForwarding returns the sysctls of devices that do not forward, where the host does.
func notForwarding(hosts, ofDevice string, devices []netlink.Link) (off []string) {
	if sysctl(hosts) == "0" {
		return nil
	}
	for _, device := range devices {
		if name := fmt.Sprintf(ofDevice, device.Attrs().Name); sysctl(name) == "0" {
			off = append(off, name)
		}
	}
	return off
}

// ourDevices returns the host ends of containers' devices.
func (h *host) ourDevices() (ours []netlink.Link) {
	for _, device := range h.devices {
		_, isOurs := names.ParseAlias(device.Attrs().Alias)
		if isOurs || slices.ContainsFunc(h.attachments, func(a *admin.Attachment) bool { return a.Device == device.Attrs().Name }) {
			ours = append(ours, device)
		}
	}
	return ours
}

// lookIPv6 finds what keeps containers from having IPv6, if a network has it.
func (h *host) lookIPv6() (findings []Finding, err error) {
	if _, ipv6 := h.families(); !ipv6 {
		return nil, nil
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
	return findings, err
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
	for _, device := range h.ourDevices() {
		if device.Attrs().MTU > mtu {
			large = append(large, fmt.Sprintf("%s (%d)", device.Attrs().Name, device.Attrs().MTU))
		}
	}
	if len(large) > 0 {
		findings = append(findings, warning("start the containers again, or restore the route's MTU",
			"the route to the outside has an MTU of %d bytes, and %s more: connections depend on ICMP errors, which many firewalls drop", mtu, list(large)))
	}
	return orGood(findings, "no container sends more than the %d bytes of the route to the outside", mtu), nil
}

// lookUnassigned finds ranges of networks with containers that lack a route which refuses packets to other addresses.
func lookUnassigned(_ context.Context, h *host) (findings []Finding, err error) {
	refused, err := rtnl.UnassignedPrefixes()
	for _, n := range h.ours() {
		isIn := func(a *admin.Attachment) bool { return a.Network == n.file.List.Name && !a.Dead && !a.Chained }
		if n.config.IPAM == nil || !slices.ContainsFunc(h.attachments, isIn) {
			continue
		}
		for _, r := range slices.Concat(n.config.IPAM.Ranges...) {
			prefixes, errRange := plugin.UnassignedPrefixes(r)
			err = errors.Join(err, errRange)
			for _, prefix := range prefixes {
				covers := func(p netip.Prefix) bool { return p.Bits() <= prefix.Bits() && p.Contains(prefix.Addr()) }
				if !slices.ContainsFunc(refused, covers) {
					findings = append(findings, wrong("the next ADD restores it, and in a cluster the node agent; end what removes it, such as systemd-networkd without ManageForeignRoutes=no",
						"%s: the unreachable route to %s is missing: packets to its addresses that no container has leave the host by other routes, such as the default route", n.name(), prefix))
				}
			}
		}
	}
	return orGood(findings, "packets to addresses that no container has are refused"), err
}

// lookFirewall finds chains that drop containers' packets unless a rule accepts them.
func lookFirewall(ctx context.Context, h *host) (findings []Finding, err error) {
	rules := firewall.Read(ctx)
	for _, chain := range rules.Forward {
		var accept []string
		for _, subnet := range h.subnets() {
			if chain.Drops != "" && chain.Applies(subnet) {
				accept = append(accept, chain.Accept(subnet))
			}
		}
		if len(accept) > 0 {
			findings = append(findings, warning(strings.Join(accept, " && "),
				"%s drops forwarded packets that no rule accepts, because %s; `ebpfnetctl doctor --send` proves whether it drops those of containers", chain, chain.Drops))
		}
	}
	for _, what := range rules.Unread {
		findings = append(findings, warning("run the tool by hand", "not all rules could be read: %s", what))
	}
	return orGood(findings, "no chain drops all forwarded packets"), nil
}
