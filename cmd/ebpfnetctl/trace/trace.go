// Package trace shows what would become of a packet. It runs copies of the loaded programs on a packet that it makes
// (BPF_PROG_TEST_RUN), hook by hook, and asks the kernel for the route and the neighbor in between. Nothing is sent, and
// nothing is written: the copies share only the maps that programs read, and the entries of connections are copied.
package trace

import (
	"context"
	"errors"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
)

// End is the source of a packet, or its destination: a container, an address, or the host itself.
type End struct {
	Container []*admin.Attachment // those of a container
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
	Reply    bool   // trace the reply, too
}

// Trace is what would become of a packet, and of its reply.
type Trace struct {
	Protocol string `json:"protocol"`
	Request  *Path  `json:"request"`
	Reply    *Path  `json:"reply,omitempty"`
}

// Verdict is what becomes of a packet in the end.
type Verdict string

// The verdicts.
const (
	Delivered Verdict = "delivered" // to a container, or to the host itself
	Sent      Verdict = "sent"      // by a device of the host
	Dropped   Verdict = "dropped"
)

// Path is the path of one packet.
type Path struct {
	Source      string  `json:"source"`
	Destination string  `json:"destination"`
	Steps       []Step  `json:"steps"`
	Verdict     Verdict `json:"verdict"`
	Detail      string  `json:"detail"` // who drops the packet and why, or who receives it
	// As the receiver gets it.
	FinalSource      string `json:"finalSource,omitempty"`
	FinalDestination string `json:"finalDestination,omitempty"`
}

// Step is one result of a hook.
type Step struct {
	Hook string `json:"hook"` // a program, or "stack"
	On   string `json:"on"`   // the device
	Step string `json:"step"` // such as "translation"
	What string `json:"what"`
}

// IsDropped reports whether the packet or its reply would be dropped.
func (t *Trace) IsDropped() bool {
	return t.Request.Verdict == Dropped || t.Reply != nil && t.Reply.Verdict == Dropped
}

// Run traces a packet. attachments are all of the host's.
func Run(ctx context.Context, attachments []*admin.Attachment, o Options) (*Trace, error) {
	w, err := newWalker(ctx, attachments)
	if err != nil {
		return nil, err
	}
	defer w.close()

	src, dst, err := o.Addresses()
	if err == nil && o.From.Host {
		src, err = w.hostSource(dst)
	}
	if err != nil {
		return nil, err
	}
	p := packet{protocol: ProtocolOf(o.Protocol, src.Is6()), src: netip.AddrPortFrom(src, o.FromPort), dst: netip.AddrPortFrom(dst, o.ToPort)}
	if err := w.fill(&p); err != nil {
		return nil, err
	}
	t := &Trace{Protocol: o.Protocol}
	if t.Request, err = w.walk(p, o.From); err != nil || !o.Reply || t.Request.Verdict == Dropped {
		return t, err
	}
	t.Reply, err = w.walk(w.last.reply(), w.receiver)
	return t, err
}

// Addresses chooses an address of each end, of one family. The host's depends on the route.
func (o Options) Addresses() (src, dst netip.Addr, err error) {
	for _, is6 := range []bool{o.IPv6, !o.IPv6} {
		if src, dst = o.From.address(is6), o.To.address(is6); src.IsValid() && dst.IsValid() {
			break
		}
	}
	if !src.IsValid() || !dst.IsValid() {
		return src, dst, errors.New("FROM and TO have no family in common: expected two addresses of IPv4, or two of IPv6")
	}
	return src, dst, nil
}

// address returns the end's address of a family, if any.
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

// ProtocolOf returns tcp, udp or icmp of a family.
func ProtocolOf(name string, is6 bool) maps.Protocol {
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

// firstPort is where the search for a port of the packet begins: clients use such ports.
const firstPort = 40000

// fill copies the entries of connections, and chooses its port if the caller has not.
func (w *walker) fill(p *packet) error {
	if err := maps.FillCopy(w.copy); err != nil {
		return err
	}
	flows, errFlows := maps.Flows(&w.copy.Datapath)
	offloads, errOffloads := maps.OffloadEntries(&w.copy.Datapath)
	if err := errors.Join(errFlows, errOffloads); err != nil {
		return err
	}
	used := map[netip.AddrPort]bool{} // by connections of the protocol
	for _, f := range flows {
		w.addFlow(f)
		if f.Protocol != p.protocol {
			continue
		}
		sides := []netip.AddrPort{f.Remote, f.Local, f.NAT}
		p.isKnown = p.isKnown || slices.Contains(sides, p.src) && slices.Contains(sides, p.dst)
		for _, side := range sides {
			used[side] = true
		}
	}
	for _, o := range offloads {
		p.isKnown = p.isKnown || o.Protocol == p.protocol && slices.Contains(o.Sides[:], p.src) && slices.Contains(o.Sides[:], p.dst)
	}
	if p.src.Port() == 0 {
		port := uint16(firstPort)
		for used[netip.AddrPortFrom(p.src.Addr(), port)] {
			port++
		}
		p.src = netip.AddrPortFrom(p.src.Addr(), port)
	}
	if p.isEcho() {
		p.dst = netip.AddrPortFrom(p.dst.Addr(), 0)
	}
	return nil
}
