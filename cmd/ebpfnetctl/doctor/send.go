package doctor

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/firewall"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// sendTimeout bounds Send, but for the removal of its container.
const sendTimeout = time.Minute

// answerTimeout is how long one connection may take.
const answerTimeout = 3 * time.Second

// Send connects a container of its own as the first runtime would, and tries connections out, in, and by a
// host port. remotes are tried instead of the default gateways. When it returns, the container is gone,
// whatever ended it. Nothing is on disk but what ADD writes, so GC removes what a SIGKILL leaves.
func Send(ctx context.Context, options Options, remotes []netip.AddrPort) (findings []Finding, err error) {
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	h, err := newHost(options)
	if err != nil {
		return nil, err
	}
	defer h.close()
	i := slices.IndexFunc(h.networks, func(n *network) bool { return n.config != nil && (n.isTaken || n.runtime.Name == "") })
	if i < 0 {
		return []Finding{{Check: "send", State: Wrong, What: "no runtime takes a valid network configuration of ebpfnet: see conflist", Remedy: "correct that first"}}, nil
	}
	c, err := connect(ctx, h.networks[i], options.CacheDir)
	if err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("--send was ended before it could try anything: %w", err)
	}
	if err != nil {
		return []Finding{{Check: "send", State: Wrong, What: err.Error(), Remedy: "see the error; `ebpfnetctl doctor --send` tries again"}}, nil
	}
	defer func() { err = errors.Join(err, c.remove(ctx)) }()
	trace, errTrace := firewall.StartTrace(c.addresses)
	findings = together(c.trials(h, remotes), func(t trial) Finding { return t.run(ctx) })
	findings = append(findings, judgeTrace(trace, errTrace, findings))
	if ctx.Err() != nil {
		return nil, fmt.Errorf("--send was ended before all was tried: %w", ctx.Err())
	}
	return findings, nil
}

// judgeTrace ends the trace and returns what the kernel has reported. If all trials have passed, a drop is none of theirs
// that matters, such as that of a late packet of a closed connection.
func judgeTrace(trace *firewall.Trace, err error, trials []Finding) Finding {
	const check = "send-firewall"

	if err != nil {
		return Finding{Check: check, State: Good, What: fmt.Sprintf("the packets were not traced: %v", err)}
	}
	drops := trace.Stop()
	hasFailed := slices.ContainsFunc(trials, func(f Finding) bool { return f.State != Good })
	switch {
	case len(drops) > 0 && hasFailed:
		return Finding{Check: check, State: Wrong, What: strings.Join(drops, "; "), Remedy: "let a rule before it accept these packets: see firewall"}
	case len(drops) > 0:
		return Finding{Check: check, State: Good, What: "after the connections: " + strings.Join(drops, "; ")}
	}
	return Finding{Check: check, State: Good, What: "no rule of nftables drops the packets; rules of iptables-legacy are not traced"}
}

type trial struct {
	name   string                      // such as "send out, IPv4"
	what   string                      // who connects to whom
	remedy string                      // if it fails
	try    func(context.Context) error // nil: what says why not
}

func (t trial) run(ctx context.Context) Finding {
	if t.try == nil {
		return Finding{Check: t.name, State: Good, What: t.what}
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	if err := t.try(ctx); err != nil {
		return Finding{Check: t.name, State: Wrong, What: fmt.Sprintf("%s: %v", t.what, err), Remedy: t.remedy}
	}
	return Finding{Check: t.name, State: Good, What: t.what + " works"}
}

func (c *container) trials(h *host, remotes []netip.AddrPort) (trials []trial) {
	for _, own := range c.addresses {
		family := "IPv6"
		if own.Is4() {
			family = "IPv4"
		}
		trials = append(trials, trial{
			"send-in", fmt.Sprintf("%s: the host connects to the container's %s", family, own),
			"see programs, firewall and the route to it (`ip route get`)",
			func(ctx context.Context) error { return c.reach(ctx, nil, netip.AddrPortFrom(own, c.port)) },
		})
		trials = append(trials, c.outward(h, own, family, remotes)...)
		if c.hostPort != 0 {
			trials = append(trials, c.byHostPort(h, own, family)...)
		}
	}
	if c.hostPort == 0 {
		trials = append(trials, trial{name: "send-host-port", what: "not tried: no plugin of the network has the capability portMappings"})
	}
	return trials
}

// outward returns the trials of connections to the outside from one of the container's addresses.
func (c *container) outward(h *host, own netip.Addr, family string, remotes []netip.AddrPort) (trials []trial) {
	const remedy = "see uplinks, forwarding and firewall; without ipMasq the outside needs a route to the container"

	add := func(remote netip.AddrPort, what string) {
		trials = append(trials, trial{"send-out", fmt.Sprintf("%s: the container connects to %s", family, what), remedy,
			func(ctx context.Context) error { return c.answers(ctx, remote) }})
	}
	for _, remote := range remotes {
		if remote.Addr().Is4() == own.Is4() {
			add(remote, remote.String())
		}
	}
	if len(remotes) > 0 {
		return trials
	}
	gateway := h.toOutside(own.Is4()).Gateway
	if !gateway.IsValid() {
		return []trial{{name: "send-out", what: family + ": not tried: the host has no default gateway; --to names a remote"}}
	}
	add(netip.AddrPortFrom(gateway, gatewayPort), "the default gateway "+gateway.String())
	return trials
}

// gatewayPort is a port of which each answer will do, also that it is closed.
const gatewayPort = 53

// byHostPort returns the trials of the host port: from the host to its own addresses, and from the
// container itself.
func (c *container) byHostPort(h *host, own netip.Addr, family string) (trials []trial) {
	const remedy = "see programs and uplinks (that of the loopback device, for 127.0.0.1 and ::1), and `ebpfnetctl ports`"

	targets := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	if own.Is6() {
		targets = []netip.Addr{netip.IPv6Loopback()}
	}
	node := h.toOutside(own.Is4()).Source
	if node.IsValid() {
		targets = append(targets, node)
	}
	for _, target := range targets {
		remote := netip.AddrPortFrom(target, c.hostPort)
		trials = append(trials, trial{"send-host-port", fmt.Sprintf("%s: the host connects to host port %s", family, remote), remedy,
			func(ctx context.Context) error { return c.reach(ctx, nil, remote) }})
	}
	if node.IsValid() {
		remote := netip.AddrPortFrom(node, c.hostPort)
		trials = append(trials, trial{"send-host-port", fmt.Sprintf("%s: the container connects to its own host port %s", family, remote), remedy,
			func(ctx context.Context) error { return c.reach(ctx, c.ns, remote) }})
	}
	return trials
}

// toOutside returns the host's route to the outside, if it has one.
func (h *host) toOutside(ipv4 bool) link.Route {
	outside := "3fff::1" // for documentation: nothing is sent there
	if ipv4 {
		outside = "203.0.113.1"
	}
	route, _ := link.RouteTo(h.rtnl, netip.MustParseAddr(outside))
	return route
}
