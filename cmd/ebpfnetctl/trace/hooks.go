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
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// Tags of bpf/tag.h.
const (
	tagNone       = 0
	tagTranslated = 0xed
	tagReentry    = 0xee
)

// outcome is what a program has done to a packet.
type outcome struct {
	verdict, tag  uint32
	before, after packet
}

func (o *outcome) isDropped() bool    { return o.verdict == loader.VerdictDrop }
func (o *outcome) isRedirected() bool { return o.verdict == loader.VerdictRedirect }

// run runs the copy of a program. If that drops the packet, the path ends.
func (w *walker) run(program string, p packet, device, ingress int, tag uint32) (o outcome, err error) {
	w.at(program, device)
	packet := loader.Packet{Frame: p.frame, Device: device, Ingress: ingress, Tag: tag}
	if program == bpf.ProgFromUplink && device == w.tunnel.IfIndex {
		packet.Tunnel = loader.Tunnel{Remote: w.nodeOf(p.src.Addr()), VNI: w.tunnel.VNI}
	}
	verdict, tag, frame, err := w.copy.Run(program, packet)
	if errors.Is(err, unix.EINVAL) && ingress != 0 {
		w.step("policy", "not checked: a test run of rules needs Linux 6.1")
		packet.Ingress = 0
		verdict, tag, frame, err = w.copy.Run(program, packet)
	}
	if err != nil {
		return o, fmt.Errorf("run a copy of %s: %w", program, err)
	}
	o = outcome{verdict: verdict, tag: tag, before: p}
	if o.after, err = p.after(frame); err != nil {
		return o, err
	}
	return o, w.report(&o)
}

// report adds the steps of a hook: what the program has done, and the flows of the packet.
func (w *walker) report(o *outcome) error {
	switch {
	case o.isDropped():
		reason, err := w.dropReason(o.after)
		w.step("verdict", "drops it: %s", reason)
		return errors.Join(err, w.drop("%s on %s drops it: %s", w.hook, w.on, reason))
	case o.isRedirected():
		w.step("verdict", "redirects it, past the host's stack")
	default:
		w.step("verdict", "passes it")
	}
	if o.after.src != o.before.src {
		w.step("translation", "source %s becomes %s", maps.AddrPortText(o.before.src), maps.AddrPortText(o.after.src))
	}
	if o.after.dst != o.before.dst {
		w.step("translation", "destination %s becomes %s", maps.AddrPortText(o.before.dst), maps.AddrPortText(o.after.dst))
	}
	flows, err := maps.Flows(&w.copy.Datapath)
	sides := []netip.AddrPort{o.before.src, o.before.dst, o.after.src, o.after.dst}
	for _, f := range flows {
		isOfPacket := f.Protocol == o.before.protocol && slices.Contains(sides, f.Remote) &&
			(slices.Contains(sides, f.Local) || slices.Contains(sides, f.NAT))
		isNew := w.addFlow(f)
		if isOfPacket && f.Kind == bpf.FlowCTNAT && o.isRedirected() {
			w.step("translation", "by the host's rules (%s), then on the fast path", f.ByHost())
		}
		switch {
		case isOfPacket && isNew:
			w.step("flow", "new: %s", f)
		case isOfPacket:
			w.step("flow", "known: %s", f)
		}
	}
	return err
}

// dropReason returns why the copy has dropped a packet: it has counted no other.
func (w *walker) dropReason(p packet) (string, error) {
	drops, errDrops := maps.Drops(&w.copy.Datapath)
	totals, errTotals := maps.DropTotals(&w.copy.Datapath)
	if err := errors.Join(errDrops, errTotals); err != nil {
		return "", err
	}
	for _, d := range drops {
		if d.Reason.IsDrop() {
			why, err := w.refusedBy(d, p)
			return fmt.Sprintf("%s (%s)%s", d.Reason, w.ownerName(d.Owner), why), err
		}
	}
	for _, t := range totals {
		if t.Packets > 0 && t.Reason.IsDrop() {
			return t.Reason.String(), nil
		}
	}
	return "uncounted, as a fragment that waits", nil
}

// fromContainer is the packet of the container behind a device.
func (w *walker) fromContainer(p packet, device int) error {
	o, err := w.run(bpf.ProgFromContainer, p, device, 0, tagNone)
	switch {
	case err != nil || o.isDropped():
		return err
	case o.isRedirected():
		return w.redirected(&o, device)
	default:
		return w.toStack(o.after, w.above(device), o.tag)
	}
}

// fromUplink is the packet that an uplink receives.
func (w *walker) fromUplink(p packet, uplink int, tag uint32) error {
	o, err := w.run(bpf.ProgFromUplink, p, uplink, 0, tag)
	switch {
	case err != nil || o.isDropped():
		return err
	case o.isRedirected() && o.tag == tagReentry:
		return w.fromUplink(o.after, uplink, tagReentry)
	case o.isRedirected():
		return w.redirected(&o, uplink)
	default:
		return w.toStack(o.after, uplink, o.tag)
	}
}

// redirected follows a packet past the stack. The kernel does not say where a test run redirects to: it is the
// container that has the destination, or the next hop.
func (w *walker) redirected(o *outcome, device int) error {
	next := o.after.dst.Addr()
	if gateway := w.gatewayOf(w.devices[device], o.before.dst.Addr()); gateway.IsValid() {
		next = gateway
	}
	to, isContainer := w.endpoints[next]
	switch {
	case isContainer && o.tag == tagNone: // into the container, past its hook
		return w.deliver(o.after, to)
	case isContainer:
		return w.toContainer(o.after, to.IfIndex, device, o.tag)
	}
	route, err := w.routeFrom(next, o.before.src.Addr(), device)
	if o.tag == tagTranslated && (err != nil || route.Type == unix.RTN_LOCAL) { // by loopback: to 127.0.0.1, no device has a route
		return w.deliverToHost(o.after)
	}
	if err != nil {
		return err
	}
	w.reportRoute(route, next)
	return w.toUplink(o.after, route.LinkIndex, device, o.tag)
}

// toContainer is the packet for the container behind a device, from the stack or redirected.
func (w *walker) toContainer(p packet, device, ingress int, tag uint32) error {
	o, err := w.run(bpf.ProgToContainer, p, device, ingress, tag)
	if err != nil || o.isDropped() {
		return err
	}
	if to, ok := w.endpoints[o.after.dst.Addr()]; ok {
		return w.deliver(o.after, to)
	}
	gateway := w.ownerName(w.devices[device].Owner)
	return w.arrive(o.after, End{Address: o.after.dst.Addr()}, Sent, "to the gateway "+gateway)
}

// toUplink is the packet that leaves by an uplink.
func (w *walker) toUplink(p packet, uplink, ingress int, tag uint32) error {
	o, err := w.run(bpf.ProgToUplink, p, uplink, ingress, tag)
	if err != nil || o.isDropped() {
		return err
	}
	return w.send(o.after, uplink)
}

// toLoopback is a packet from the host to itself.
func (w *walker) toLoopback(p packet) error {
	o, err := w.run(bpf.ProgToLoopback, p, loopback, 0, tagNone)
	switch {
	case err != nil || o.isDropped():
		return err
	case o.isRedirected():
		return w.redirected(&o, loopback)
	default:
		return w.deliverToHost(o.after)
	}
}

const loopback = 1

// reportRules adds the rules that have admitted a packet at the end of its path. A reply needs none.
func (w *walker) reportRules(p packet) error {
	if p.isReply {
		return nil
	}
	if sender, ok := w.devices[w.sender]; ok {
		if err := w.reportRule(p, sender, true); err != nil {
			return err
		}
	}
	if to, ok := w.endpoints[p.dst.Addr()]; ok {
		return w.reportRule(p, w.devices[to.IfIndex], false)
	}
	return nil
}

func (w *walker) reportRule(p packet, of maps.Device, isEgress bool) error {
	judged, err := w.judge(p, of, isEgress)
	switch container := w.ownerName(of.Owner); {
	case err != nil || !judged.IsIsolated:
	case judged.Admits:
		w.step("policy", "%s of %s: %s", admin.DirectionOf(isEgress), container, judged.Why)
	case judged.IsAudit:
		w.step("policy", "%s of %s would refuse it, without audit mode: %s", admin.DirectionOf(isEgress), container, judged)
	}
	return err
}

// judge judges a packet by the rules of the container behind a device.
func (w *walker) judge(p packet, of maps.Device, isEgress bool) (judged admin.Judgment, err error) {
	entry, err := maps.GetPolicy(&w.copy.Datapath, of.Policy)
	if err != nil || entry.IsEmpty() {
		return judged, err
	}
	c := policy.Connection{Protocol: p.protocol}
	if isEgress {
		c.Peer, err = w.explainer.PeerOf(p.dst.Addr())
		c.Peer.Self = c.Peer.Network != 0 && w.endpoints[p.dst.Addr()].Container == of.Container
	} else if sender, ok := w.devices[w.sender]; ok {
		c.Peer, err = w.explainer.PeerOf(w.from)
		c.Peer.Self = sender.Container == of.Container
	} else {
		c.Peer, err = w.explainer.PeerOf(p.src.Addr())
	}
	if err != nil {
		return judged, err
	}
	if c.Port = p.dst.Port(); !isEgress && w.owners[of.Owner.String()] != nil {
		c.Port = w.owners[of.Owner.String()].PortBehind(p.protocol.String(), p.dst)
	}
	return w.explainer.Judge(entry, isEgress, c)
}

// refusedBy says which rule nearly admits a packet that rules have dropped, or returns "" for other drops.
func (w *walker) refusedBy(d maps.Drop, p packet) (string, error) {
	isEgress := bpf.Reason(d.Reason) == bpf.ReasonPolicyEgress
	if !isEgress && bpf.Reason(d.Reason) != bpf.ReasonPolicyIngress {
		return "", nil
	}
	for _, device := range w.devices {
		if device.Owner == d.Owner {
			judged, err := w.judge(p, device, isEgress)
			return ": " + judged.String(), err
		}
	}
	return "", nil
}
