package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Tags of bpf/tag.h.
const (
	tagBypass     = 0xeb
	tagTranslated = 0xed
	tagReentry    = 0xee
)

// outcome is what a program has done to a packet, and what it has written.
type outcome struct {
	verdict       uint32
	before, after packet
	cached        *bpf.FwdEntry // the decision of a moment ago, or nil
	hit           bool          // and the program has repeated it
	flows         []flow
	drop          *maps.Drop // nil: none

	withoutIngress bool // the kernel did not take the device that has received the packet
}

// run runs the copy of a program.
func (w *walker) run(program string, p packet, device, ingress int, tag uint32) (o outcome, err error) {
	w.at(program, device)
	tuple := maps.Tuple(p.protocol, p.src, p.dst, device, p.isReply && p.protocol != maps.TCP && p.protocol != maps.UDP)
	if id := fmt.Sprint(p.src, p.dst, p.protocol, device); !w.copied[id] {
		w.copied[id] = true
		if err := maps.CopyTuple(w.copy, tuple); err != nil {
			return o, err
		}
	}
	if o.cached, err = maps.Decision(w.copy, tuple); err != nil {
		return o, err
	}
	known, err := w.flows()
	if err != nil {
		return o, err
	}
	packet := p.to(device, ingress, tag)
	if program == bpf.ProgFromUplink && device == w.tunnel.IfIndex {
		packet.Tunnel = w.received(p)
	}
	verdict, frame, err := w.copy.Run(program, packet)
	if errors.Is(err, unix.EINVAL) && ingress != 0 { // before Linux 6.1
		o.withoutIngress = true
		packet.Ingress = 0
		verdict, frame, err = w.copy.Run(program, packet)
	}
	if err != nil {
		return o, fmt.Errorf("run a copy of %s: %w", program, err)
	}
	o.verdict, o.before = verdict, p
	if o.after, err = p.after(frame); err != nil {
		return o, err
	}
	return o, w.note(&o, tuple, known)
}

// note reads what a program has written.
func (w *walker) note(o *outcome, tuple bpf.FwdKey, known []maps.Flow) error {
	now, err := maps.Decision(w.copy, tuple)
	if err != nil {
		return err
	}
	o.hit = o.cached != nil && now != nil && now.Updated == o.cached.Updated && now.Ifindex != 0 && o.verdict == loader.VerdictRedirect
	flows, err := maps.Flows(&w.copy.Datapath)
	if err != nil {
		return err
	}
	for _, f := range flows {
		isSame := func(k maps.Flow) bool { k.State = f.State; return k == f }
		o.flows = append(o.flows, flow{f, !slices.ContainsFunc(known, isSame)})
	}
	if o.verdict != loader.VerdictDrop {
		return nil
	}
	drops, err := maps.Drops(&w.copy.Datapath)
	if err != nil {
		return err
	}
	if len(drops) > 0 {
		o.drop = &drops[0]
		return nil
	}
	totals, err := maps.DropTotals(&w.copy.Datapath)
	for _, t := range totals {
		if t.Packets > 0 {
			o.drop = &maps.Drop{DropCount: t}
		}
	}
	return err
}

// flow is a flow, and whether the program has made it.
type flow struct {
	maps.Flow
	isNew bool
}

func (f flow) String() string {
	if f.isNew {
		return "a new flow: " + f.Flow.String()
	}
	return "flow: " + f.Flow.String()
}

// flow returns the flow of a kind that the packet belongs to, if any.
func (o *outcome) flow(kinds ...bpf.FlowKind) (found flow, ok bool) {
	sides := []netip.AddrPort{o.before.src, o.before.dst, o.after.src, o.after.dst}
	for _, f := range o.flows {
		if slices.Contains(kinds, f.Kind) && f.Protocol == o.before.protocol && slices.Contains(sides, f.Remote) &&
			(slices.Contains(sides, f.Local) || slices.Contains(sides, f.NAT)) {
			return f, true
		}
	}
	return flow{}, false
}

// dropped ends the way if the program has dropped the packet.
func (w *walker) dropped(o *outcome, step string) (bool, error) {
	if o.verdict != loader.VerdictDrop {
		return false, nil
	}
	if o.drop == nil {
		w.tell(step, "", "ends here, uncounted: a copy for conntrack, or a fragment that waits")
		return true, w.end(Dropped, "%s on %s ends it uncounted", w.hook, w.on)
	}
	entry := ""
	if o.drop.Owner != 0 {
		entry = w.ownerName(o.drop.Owner)
	}
	w.tell(step, entry, "drops it: %s", o.drop.Reason)
	return true, w.end(Dropped, "%s on %s drops it: %s", w.hook, w.on, o.drop.Reason)
}

// isSpoof returns whether a drop is that of anti-spoofing.
func (o *outcome) isSpoof() bool {
	if o.drop == nil {
		return false
	}
	reason := bpf.Reason(o.drop.Reason)
	return reason >= bpf.ReasonMAC && reason <= bpf.ReasonHeaders || reason == bpf.ReasonTunnel || reason == bpf.ReasonBridge ||
		reason == bpf.ReasonICMPError || reason == bpf.ReasonTruncated
}

// fromContainer is the packet of the container behind a device.
func (w *walker) fromContainer(p packet, device int) error {
	o, err := w.run(bpf.ProgFromContainer, p, device, 0, 0)
	if err != nil {
		return err
	}
	d, isKnown := w.devices[device]
	switch {
	case o.isSpoof():
		_, err := w.dropped(&o, "anti-spoofing")
		return err
	case o.hit:
		w.tellCache(&o)
		return w.redirected(&o, device)
	case isKnown && d.AntiSpoof:
		w.tell("anti-spoofing", w.ownerName(d.Owner), "passes: the container's own MAC and address")
	default:
		w.tell("anti-spoofing", "", "off")
	}
	w.tellCache(&o)
	if f, ok := o.flow(bpf.FlowEgress); ok && d.IngressPolicy != maps.Open {
		w.tell("policy", f.String(), "ingressPolicy %s: replies are admitted", d.IngressPolicy)
	}
	w.tellGateway(&o, d)
	w.tellHostPort(&o)
	if ended, err := w.dropped(&o, "verdict"); ended {
		return err
	}
	w.tellOffload(&o)
	w.tellTranslation(&o)
	if o.verdict == loader.VerdictRedirect {
		return w.redirected(&o, device)
	}
	return w.byStack(o.after, w.above(device), w.tag(o.after, device))
}

// fromUplink is the packet that an uplink receives.
func (w *walker) fromUplink(p packet, uplink int, tag uint32) error {
	o, err := w.run(bpf.ProgFromUplink, p, uplink, 0, tag)
	if err != nil {
		return err
	}
	w.tellWithoutEthernet(uplink)
	w.tellNode("from", p.src.Addr(), uplink)
	w.tellCache(&o)
	w.tellHostPort(&o)
	if ended, err := w.dropped(&o, "verdict"); ended {
		return err
	}
	w.tellOffload(&o)
	w.tellTranslation(&o)
	if o.verdict != loader.VerdictRedirect {
		routed, err := maps.RoutedTag(w.copy, maps.Tuple(o.after.protocol, o.after.src, o.after.dst, uplink, o.after.isReply))
		if err != nil {
			return err
		}
		return w.byStack(o.after, uplink, max(routed, w.tag(o.after, uplink)))
	}
	if w.uplinks[uplink].Bridge && o.after.ttl == p.ttl && slices.Equal(o.after.destinationMAC(), p.destinationMAC()) {
		w.tell("bridge", "", "enters %s once more, so that rules see what the container sees", w.on)
		return w.fromUplink(o.after, uplink, tagReentry)
	}
	return w.redirected(&o, uplink)
}

// redirected follows a packet that bypasses the stack. The kernel does not say where to, but what the program has
// written into the packet does.
func (w *walker) redirected(o *outcome, device int) error {
	p := o.after
	to, isContainer := w.endpoints[p.dst.Addr()]
	gateway := w.endpointWithMAC(p.destinationMAC())
	switch {
	case p.ttl < o.before.ttl && isContainer: // bpf_redirect_peer
		return w.deliver(p, to)
	case p.ttl < o.before.ttl:
		return w.bypassTo(o, device)
	case gateway != nil:
		return w.toContainer(p, gateway.IfIndex, device, tagTranslated)
	case isContainer: // a hairpin client's, or the reply to one
		p.build(w.mac(to.IfIndex), to.MAC)
		return w.toContainer(p, to.IfIndex, device, tagTranslated)
	case p.src != o.before.src || p.dst != o.before.dst:
		return w.toHost(p)
	default:
		return w.bypassTo(o, device)
	}
}

// bypassTo sends the packet of a container by an uplink, past the stack.
func (w *walker) bypassTo(o *outcome, device int) error {
	tag, out := uint32(tagBypass), 0
	target := o.after.dst.Addr()
	if o.hit {
		tag, out = tagTranslated, int(o.cached.Ifindex)
	} else if gateway := w.gatewayOf(w.devices[device], target); gateway.IsValid() && o.after.ttl == o.before.ttl {
		tag, target = 0, gateway
	}
	route, err := w.routeFrom(target, o.after.src.Addr(), device)
	if err != nil && out == 0 {
		return err
	}
	if out == 0 {
		out = route.LinkIndex
	}
	w.tellNextHop(route, target)
	return w.toUplink(o.after, out, device, tag)
}

// toContainer is the packet for the container behind a device, from the stack or redirected.
func (w *walker) toContainer(p packet, device, ingress int, tag uint32) error {
	o, err := w.run(bpf.ProgToContainer, p, device, ingress, tag)
	if err != nil {
		return err
	}
	d := w.devices[device]
	if ended, err := w.dropped(&o, "policy"); ended {
		return err
	}
	isAdmitted := w.tellPolicy(&o, d, ingress)
	if o.withoutIngress && !isAdmitted {
		return w.end(Dropped, "%s on %s drops it, by the entries: %s", w.hook, w.on, maps.Reason(bpf.ReasonPolicy))
	}
	w.tellClaim(&o)
	w.tellTranslation(&o)
	if to, ok := w.endpoints[o.after.dst.Addr()]; ok {
		return w.deliver(o.after, to)
	}
	w.arrives(o.after, End{Address: o.after.dst.Addr()})
	return w.end(Sent, "to %s, which is a gateway", w.ownerName(d.Owner))
}

// toUplink is the packet that leaves by an uplink.
func (w *walker) toUplink(p packet, uplink, ingress int, tag uint32) error {
	o, err := w.run(bpf.ProgToUplink, p, uplink, ingress, tag)
	if err != nil {
		return err
	}
	w.tellWithoutEthernet(uplink)
	w.tellNode("to", p.dst.Addr(), uplink)
	if ended, err := w.dropped(&o, "translation"); ended {
		return err
	}
	w.tellClaim(&o)
	w.tellTranslation(&o)
	if o.after.src == o.before.src {
		w.tell("translation", "", "%s", w.whyNot(p))
	}
	w.arrives(o.after, End{Address: o.after.dst.Addr()})
	w.outside = uplink
	return w.end(Sent, "by %s, as %s", w.on, o.after)
}

// toLoopback is what the host sends to itself.
func (w *walker) toLoopback(p packet) error {
	o, err := w.run(bpf.ProgToLoopback, p, loopback, 0, 0)
	if err != nil {
		return err
	}
	w.tellHostPort(&o)
	if ended, err := w.dropped(&o, "verdict"); ended {
		return err
	}
	w.tellTranslation(&o)
	if o.verdict == loader.VerdictRedirect {
		return w.redirected(&o, 0)
	}
	return w.toHost(o.after)
}

const loopback = 1

// deliver ends the way in a container.
func (w *walker) deliver(p packet, to maps.Endpoint) error {
	w.arrives(p, End{Address: to.Addr})
	return w.end(Delivered, "to %s, as %s", w.ownerName(to.Owner), p)
}

// toHost ends the way in the host.
func (w *walker) toHost(p packet) error {
	w.arrives(p, End{Host: true})
	return w.end(Delivered, "to the host itself, as %s", p)
}

func (w *walker) endpointWithMAC(mac []byte) *maps.Endpoint {
	for _, e := range w.endpoints {
		if slices.Equal(e.MAC, mac) {
			return &e
		}
	}
	return nil
}
