// Package trace tells what would become of a packet. It runs copies of the loaded programs on one that it makes
// (BPF_PROG_TEST_RUN), hook by hook, and asks the kernel for the route in between. Nothing is sent, and nothing is
// written: the copies share only the maps that programs read, and the entries of connections are copied.
//
// What a program does is the truth. This package only looks up the entries that explain it.
//
// It may import bpf, cmd/ebpfnetctl/firewall, loader, loader/rtnl, maps, plugin/link and plugin/operator.
package trace

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/operator"
)

// End is where a packet comes from, or is for: a container, an address, or the host itself.
type End struct {
	Container []*operator.Attachment // those of a container
	Address   netip.Addr
	Host      bool
	Outside   bool // any address of the outside
}

// Options say which packet.
type Options struct {
	From, To End
	FromPort uint16 // 0: one that no connection has. Else the packet may be one of a known connection
	ToPort   uint16
	Protocol string // tcp, udp or icmp
	IPv6     bool   // where both ends have both families
	Reply    bool   // tell the way of the reply, too
}

// Trace is what would become of a packet, and of its reply.
type Trace struct {
	Seen     *Seen  `json:"seen,omitempty"` // the real packet that it is about, see Live
	Protocol string `json:"protocol"`
	Request  *Way   `json:"request"`
	Reply    *Way   `json:"reply,omitempty"`
}

// Fate is what becomes of a packet in the end.
type Fate string

// The fates.
const (
	Delivered Fate = "delivered" // to a container, or to the host itself
	Sent      Fate = "sent"      // by a device of the host
	Dropped   Fate = "dropped"
)

// Way is the way of one packet.
type Way struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Steps       []Step `json:"steps"`
	Fate        Fate   `json:"fate"`
	Verdict     string `json:"verdict"` // who drops it and why, or who gets it, and as what
	// As the receiver gets it.
	FinalSource      string `json:"finalSource,omitempty"`
	FinalDestination string `json:"finalDestination,omitempty"`
}

// Step is something that decides about a packet, and how.
type Step struct {
	Hook  string `json:"hook"`  // a program, or "stack"
	On    string `json:"on"`    // the device
	Step  string `json:"step"`  // such as "policy"
	What  string `json:"what"`  // how it decides
	Entry string `json:"entry"` // the entry that makes it so, or ""
}

// IsDropped returns whether the packet or its reply would be dropped.
func (t *Trace) IsDropped() bool {
	return t.Request.Fate == Dropped || t.Reply != nil && t.Reply.Fate == Dropped
}

// Run traces a packet. attachments are all of the host's.
func Run(ctx context.Context, attachments []*operator.Attachment, o Options) (*Trace, error) {
	src, dst, err := addressesOf(o)
	if err != nil {
		return nil, err
	}
	w, err := newWalk(ctx, attachments)
	if err != nil {
		return nil, err
	}
	defer w.close()

	p := packet{protocol: protocolOf(o.Protocol, src.Is6()), ttl: firstTTL}
	p.src, p.dst = netip.AddrPortFrom(src, o.FromPort), netip.AddrPortFrom(dst, o.ToPort)
	if err := w.fill(&p); err != nil {
		return nil, err
	}
	t := &Trace{Protocol: o.Protocol}
	if t.Request, err = w.walk(&p, o.From); err != nil || !o.Reply || t.Request.Fate == Dropped {
		return t, err
	}
	reply := w.last.reply()
	t.Reply, err = w.walk(&reply, w.receiver)
	return t, err
}

// addressesOf chooses an address of each end, of one family.
func addressesOf(o Options) (src, dst netip.Addr, err error) {
	for _, is6 := range []bool{o.IPv6, !o.IPv6} {
		if src, dst = o.From.address(is6), o.To.address(is6); src.IsValid() && dst.IsValid() {
			break
		}
	}
	if !src.IsValid() || !dst.IsValid() {
		return src, dst, errors.New("FROM and TO have no family in common: expected two addresses of IPv4, or two of IPv6")
	}
	if o.From.Host {
		src, err = hostSource(dst)
	}
	return src, dst, err
}

// address returns the end's address of a family, if any. The host's depends on the route.
func (e End) address(is6 bool) netip.Addr {
	switch {
	case e.Container != nil:
		for _, a := range e.Container {
			for _, address := range a.Addresses {
				if address.Address.Is6() == is6 {
					return address.Address
				}
			}
		}
		return netip.Addr{}
	case e.Outside && is6:
		return netip.MustParseAddr("3fff::1") // for documentation (RFC 9637, RFC 5737)
	case e.Outside:
		return netip.MustParseAddr("203.0.113.1")
	case e.Host && is6:
		return netip.IPv6Loopback()
	case e.Host:
		return netip.MustParseAddr("127.0.0.1")
	case e.Address.Is6() == is6:
		return e.Address
	default:
		return netip.Addr{}
	}
}

func protocolOf(name string, is6 bool) maps.Protocol {
	switch {
	case name == "udp":
		return maps.UDP
	case name == "icmp" && is6:
		return maps.ICMPv6
	case name == "icmp":
		return maps.ICMP
	default:
		return maps.TCP
	}
}

// fill copies the entries of the packet's connection, and chooses its port if nothing else has.
func (w *walker) fill(p *packet) error {
	addresses := []netip.Addr{p.src.Addr(), p.dst.Addr()}
	for _, port := range w.ports {
		if port.HostPort == p.dst.Port() && port.Protocol == p.protocol {
			addresses = append(addresses, port.ContainerAddr)
		}
	}
	clear(w.copied)
	if err := maps.FillCopy(w.copy, addresses...); err != nil {
		return err
	}
	flows, err := w.flows()
	if err != nil {
		return err
	}
	isUsed := func(port netip.AddrPort) bool {
		for _, f := range flows {
			if f.Protocol == p.protocol && (f.Remote == port || f.Local == port || f.NAT == port) {
				return true
			}
		}
		return false
	}
	isPacketOf := func(f maps.Flow) bool {
		sides := []netip.AddrPort{f.Remote, f.Local, f.NAT}
		return f.Protocol == p.protocol && slices.Contains(sides, p.src) && slices.Contains(sides, p.dst)
	}
	p.tcpFlags = tcpSYN
	if p.src.Port() != 0 && w.isKnown(p, slices.ContainsFunc(flows, isPacketOf)) {
		p.tcpFlags = tcpACK
	}
	for port := uint16(firstPort); p.src.Port() == 0; port++ {
		if candidate := netip.AddrPortFrom(p.src.Addr(), port); !isUsed(candidate) {
			p.src = candidate
		}
	}
	if p.protocol != maps.TCP && p.protocol != maps.UDP {
		p.dst = netip.AddrPortFrom(p.dst.Addr(), 0)
	}
	return nil
}

// flows lists the flows that the copy has, also where flows has lost them.
func (w *walker) flows() ([]maps.Flow, error) {
	flows, err := maps.Flows(&w.copy.Datapath)
	backup, errBackup := maps.FlowsBackup(&w.copy.Datapath)
	return append(flows, backup...), errors.Join(err, errBackup)
}

// firstPort is where the search for a port of the packet begins: those of clients are there.
const firstPort = 40000

// isKnown returns whether the packet belongs to a connection that has a flow, or is offloaded.
func (w *walker) isKnown(p *packet, hasFlow bool) bool {
	offloads, _ := maps.OffloadEntries(&w.copy.Datapath) // what can be read
	for _, o := range offloads {
		if o.Protocol == p.protocol && (o.Sides == [2]netip.AddrPort{p.src, p.dst} || o.Sides == [2]netip.AddrPort{p.dst, p.src}) {
			return true
		}
	}
	return hasFlow
}

func (w *walker) walk(p *packet, from End) (*Way, error) {
	w.way = &Way{Source: maps.AddrPortText(p.src), Destination: maps.AddrPortText(p.dst)}
	w.last = *p
	return w.way, w.start(*p, from)
}
