package doctor

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/echo"
	"github.com/ebpfnet/ebpfnet/maps"
)

// answerWithin is how long a node may take to answer one packet, twice.
const answerWithin = time.Second

// look asks a node: first whether it answers at all, then what becomes of containers' packets on the way.
func (p *peer) look() []Finding {
	trip, findings := p.lookReach()
	if len(findings) > 0 {
		return findings
	}
	if trip == 0 {
		findings = []Finding{warning("let ICMP echo requests in there (sysctls net.ipv4.icmp_echo_ignore_all and net.ipv6.icmp.echo_ignore_all, or a firewall)",
			"%s answers UDP but no echoes, so lengths of packets were not tried", p.title())}
	} else {
		findings = p.lookMTU()
	}
	findings = append(findings, p.lookChecksums()...)
	return orGood(findings, "%s answers %s in %.2fms; packets of %d bytes pass undivided, and checksums are right", p.title(), p.way(), trip.Seconds()*1000, p.needs())
}

// lookReach returns the longest round trip, or 0 where a node answers UDP but no echoes, or why it answers nothing.
func (p *peer) lookReach() (trip time.Duration, findings []Finding) {
	trips, errs := make([]time.Duration, len(p.prefixes)), make([]error, len(p.prefixes))
	p.atOnce(func(i int, entry maps.Node) {
		trips[i], errs[i] = echo.RoundTrip(entry.Answerer(), answerWithin)
		if errs[i] != nil && echo.Closed(entry.Answerer(), echo.ByKernel, answerWithin) == nil {
			errs[i] = nil
		}
	})
	isSilent := func(err error) bool { return err != nil }
	i := slices.IndexFunc(errs, isSilent)
	switch {
	case i < 0 && slices.Contains(trips, 0):
		return 0, nil
	case i < 0:
		return slices.Max(trips), nil
	case slices.Contains(errs, nil):
		return 0, []Finding{wrong("see the log of ebpfnet-node's pod there", "%s answers %s, but not for its containers in %s: %v", p.title(), p.way(), p.prefixes[i].Prefix, errs[i])}
	case p.isDirect:
		return 0, []Finding{wrong(fmt.Sprintf("see the node, its firewall, and `ip route get %s`", p.remote), "%s: %v", p.title(), errs[i])}
	default:
		return 0, []Finding{p.whyNoTunnel()}
	}
}

// atOnce does something for all prefixes: each silence takes its time.
func (p *peer) atOnce(do func(i int, entry maps.Node)) {
	var all sync.WaitGroup
	for i, entry := range p.prefixes {
		all.Go(func() { do(i, entry) })
	}
	all.Wait()
}

// whyNoTunnel tells why a node does not answer by the tunnel. A tunnel's port never answers itself, unless it is closed.
func (p *peer) whyNoTunnel() Finding {
	err := echo.Refused(netip.AddrPortFrom(p.remote, p.port), echo.ByDevice, answerWithin)
	switch {
	case err == nil:
		return wrong(fmt.Sprintf("see whether ebpfnet-node runs there, with the same --port, and %s", p.letIn()),
			"%s refuses UDP port %d: no tunnel has it there, or a firewall rejects it", p.title(), p.port)
	case errors.Is(err, unix.EPERM):
		return wrong(p.accept("output"), "this host's own firewall drops UDP to port %d of %s", p.port, p.title())
	case p.isAlive():
		return wrong(p.letIn()+"; then see whether `ebpfnetctl nodes` there has this node",
			"%s answers, but not by the tunnel: a firewall drops UDP port %d in one of the directions, or that node does not know this one", p.title(), p.port)
	default:
		return wrong(fmt.Sprintf("see whether the node runs, and `ip route get %s`", p.remote), "%s answers neither by the tunnel nor itself", p.title())
	}
}

// letIn is what a firewall needs.
func (p *peer) letIn() string {
	return fmt.Sprintf("let UDP port %d in, on both nodes (%s) and between them (a cloud's security groups)", p.port, p.accept("input"))
}

// accept has a host's firewall accept the tunnel's packets in a chain. Whose tables those of nft are nobody knows.
func (p *peer) accept(chain string) string {
	iptables := "iptables"
	if p.remote.Is6() {
		iptables = "ip6tables"
	}
	return fmt.Sprintf("%s -I %s -p udp --dport %d -j ACCEPT, or a rule in your table of nft, for example nft insert rule inet filter %s udp dport %[3]d accept",
		iptables, strings.ToUpper(chain), p.port, chain)
}

// isAlive returns whether the node itself answers anything.
func (p *peer) isAlive() bool {
	if _, err := echo.RoundTrip(p.remote, answerWithin); err == nil {
		return true
	}
	return echo.Closed(p.remote, echo.ByDevice, answerWithin) == nil
}

// needs returns the size of the longest packets between the nodes.
func (p *peer) needs() (size int) {
	for _, entry := range p.prefixes {
		size = max(size, entry.OuterMTU())
	}
	return size
}

// lookMTU finds a link that takes less than the longest packets, and tells what becomes of them.
func (p *peer) lookMTU() []Finding {
	size, silent, err := p.pathMTU()
	if err != nil {
		return []Finding{{State: Unknown, What: fmt.Sprintf("%s: the path's MTU could not be found out: %v", p.title(), err)}}
	}
	if size >= p.needs() {
		return nil
	}
	remedy := fmt.Sprintf("--mtu %d for ebpfnet-node on all nodes, and start containers again", size)
	if p.isDirect {
		remedy = fmt.Sprintf("ip link set %s mtu %d, on all nodes of the link", word(p.uplink), size)
	}
	what := fmt.Sprintf("a link to %s takes packets of %d bytes, and containers' have up to %d", p.title(), size, p.needs())
	switch {
	case !silent:
		return []Finding{warning(remedy, "%s: they learn of it, and their first long packets are lost or divided", what)}
	case p.carriesLong():
		return []Finding{warning(remedy, "%s; it says nothing of it, so those in the tunnel are divided: that is slow, and some networks drop the pieces", what)}
	default:
		return []Finding{wrong(remedy+"; or let routers' ICMP errors pass (too big, fragmentation needed)", "%s; it says nothing of it, so connections hang as soon as they send much", what)}
	}
}

// pathMTU returns the size of the longest packets between the nodes that are not divided, and whether longer ones get
// lost silently. A node that answers only by the tunnel is asked there.
func (p *peer) pathMTU() (size int, silent bool, err error) {
	size, err = echo.PathMTU(p.remote, p.needs(), answerWithin)
	if err != nil && !errors.Is(err, echo.ErrSilent) {
		first := p.prefixes[0]
		size, err = echo.PathMTU(first.Answerer(), first.MTU, answerWithin)
		size += first.OuterMTU() - first.MTU
	}
	if errors.Is(err, echo.ErrSilent) {
		return size, true, nil
	}
	return size, false, err
}

// carriesLong returns whether the longest packets of containers arrive, though perhaps divided.
func (p *peer) carriesLong() bool {
	for _, entry := range p.prefixes {
		if echo.Long(entry.Answerer(), entry.MTU, answerWithin) != nil {
			return false
		}
	}
	return true
}

// lookChecksums finds a device that computes checksums wrongly: then only what the kernel has computed arrives.
func (p *peer) lookChecksums() []Finding {
	found := make([][]Finding, len(p.prefixes))
	p.atOnce(func(i int, entry maps.Node) { found[i] = p.lookChecksumsTo(entry) })
	return slices.Concat(found...)
}

func (p *peer) lookChecksumsTo(entry maps.Node) []Finding {
	byDevice := echo.Closed(entry.Answerer(), echo.ByDevice, answerWithin)
	byKernel := echo.Closed(entry.Answerer(), echo.ByKernel, answerWithin)
	switch {
	case byDevice == nil && byKernel == nil:
		return nil
	case byDevice != nil && byKernel != nil:
		return []Finding{warning("let UDP ports 33434 to 33523, as traceroute uses them, in there",
			"%s answers pings, but no UDP (%v), so checksums could not be tried", p.title(), byDevice)}
	default:
		return []Finding{p.blameOffload(entry, byDevice != nil)}
	}
}

// blameOffload names the device whose offload is to be switched off. Inside of a tunnel over IPv4 the tunnel's own will
// do, and the host's other packets keep theirs; over IPv6 the outer checksum is the uplink's, too.
func (p *peer) blameOffload(entry maps.Node, device bool) Finding {
	lost, arrive := "that are left to "+p.uplink, "that the kernel computes"
	if !device {
		lost, arrive = arrive, lost
	}
	cure := fmt.Sprintf("ethtool -K %s tx off", word(p.uplink))
	if device && !p.isDirect && p.remote.Is4() {
		cure = fmt.Sprintf("ethtool -K %s tx-checksum-ip-generic off", word(p.tunnel))
	}
	return wrong(cure+", after each boot, until the driver or the firmware of "+word(p.uplink)+" is mended",
		"packets to %s in %s arrive with checksums %s, but not with those %s: pings work, TCP and UDP do not", p.title(), entry.Prefix, arrive, lost)
}
