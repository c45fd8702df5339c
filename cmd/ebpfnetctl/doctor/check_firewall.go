package doctor

import (
	"context"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/firewall"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// rules returns the firewall's rules, which are read once.
func (h *host) rules(ctx context.Context) *firewall.Rules {
	if h.firewall == nil {
		h.firewall = firewall.Read(ctx)
	}
	return h.firewall
}

// lookFirewall judges the first packets of connections from and to the containers' subnets.
func lookFirewall(ctx context.Context, h *host) (findings []Finding, err error) {
	rules := h.rules(ctx)
	ports, err := h.hostPorts()
	for _, subnet := range h.subnets() {
		out, known := h.sampleOf(subnet)
		if !known {
			continue
		}
		in := firewall.Packet{From: out.To, To: out.From, In: out.Out, Out: out.In}
		hasPorts := slices.ContainsFunc(ports, func(p maps.HostPort) bool { return subnet.Contains(p.ContainerAddr) })
		findings = append(findings, judge(rules, subnet, out, in, hasPorts)...)
	}
	for _, what := range rules.Unread {
		findings = append(findings, warning("run the tool by hand", "not all rules could be read: %s", what))
	}
	if err != nil {
		return findings, err
	}
	return orGood(findings, "no rule drops what is forwarded for containers"), nil
}

// judge returns what is wrong with the rules for one subnet.
func judge(rules *firewall.Rules, subnet netip.Prefix, out, in firewall.Packet, hasPorts bool) (findings []Finding) {
	sent, received := rules.Judge(out), rules.Judge(in)
	if sent.Fate == firewall.IsDropped {
		what := "send"
		if received.Fate == firewall.IsDropped {
			what = "send and receive"
		}
		return []Finding{wrong(sent.Accept(subnet), "%s drops what containers in %s %s: no connection is opened", sent.By, subnet, what)}
	}
	if received.Fate == firewall.IsDropped {
		f := warning(received.Accept(subnet), "%s drops connections from outside to containers in %s: host ports would not work", received.By, subnet)
		if hasPorts {
			f = wrong(f.Remedy, "%s drops connections from outside to the host ports of containers in %s", received.By, subnet)
		}
		findings = append(findings, f)
	}
	if sent.Fate == firewall.MayBeDropped {
		findings = append(findings, warning("ebpfnetctl doctor --send proves it", "%s drops what containers in %s send, unless a rule accepts it that this check does not understand", sent.By, subnet))
	}
	return findings
}

// sampleOf returns a packet from a subnet to the outside. known is false where the host has no way there.
func (h *host) sampleOf(subnet netip.Prefix) (p firewall.Packet, known bool) {
	p = firewall.Packet{From: subnet.Addr(), To: netip.MustParseAddr("203.0.113.1"), In: "ebpf00000000000"}
	if subnet.Addr().Is6() {
		p.To = netip.MustParseAddr("3fff::1")
	}
	if !subnet.IsSingleIP() { // the first two are the subnet's and the gateway's
		p.From = p.From.Next().Next()
	}
	for _, a := range h.attachments {
		for _, address := range a.Addresses {
			if subnet.Contains(address.Address) && a.Device != "" {
				p.From, p.In = address.Address, a.Device
			}
		}
	}
	if route, err := link.RouteTo(h.rtnl, p.To); err == nil {
		if device := h.device(route.Device); device != nil {
			p.Out = device.Attrs().Name
		}
	} else if uplinks, err := h.uplinks(); err == nil && len(uplinks) > 0 {
		p.Out = uplinks[0].Attrs().Name
	}
	return p, p.Out != ""
}

// route is a route of the main table.
type route struct {
	netlink.Route
	to netip.Prefix
}

// routes returns the routes of the main table, but default routes and those of single addresses.
func (h *host) routes() (routes []route, err error) {
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		all, err := rtnl.Routes(h.rtnl, family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, err
		}
		for _, r := range all {
			if r.Dst == nil {
				continue
			}
			if to := link.PrefixOf(*r.Dst); to.Bits() > 0 && !to.IsSingleIP() && !to.Addr().IsLinkLocalUnicast() {
				routes = append(routes, route{r, to})
			}
		}
	}
	return routes, nil
}
