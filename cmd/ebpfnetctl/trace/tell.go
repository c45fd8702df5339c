package trace

import (
	"fmt"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

func (w *walker) tellCache(o *outcome) {
	switch {
	case o.hit:
		w.tell("cache", fmt.Sprintf("to %s", w.linkName(int(o.cached.Ifindex))), "does as with the connection's last packet, a moment ago")
	case o.cached != nil && o.cached.Ifindex == 0:
		w.tell("cache", "", "knows the connection as one of the host's stack")
	case o.cached != nil:
		w.tell("cache", "", "has nothing that holds for this packet: it is decided in full")
	default:
		w.tell("cache", "", "has nothing of this connection: it is decided in full")
	}
}

// tellOffload tells whether the packet bypasses the stack. That is seen by its TTL, which the stack would have
// decremented.
func (w *walker) tellOffload(o *outcome) {
	entry := ""
	offloads, _ := maps.OffloadEntries(&w.copy.Datapath) // what can be read
	for _, e := range offloads {
		if e.Protocol == o.before.protocol && (e.Sides == [2]netip.AddrPort{o.after.src, o.after.dst} || e.Sides == [2]netip.AddrPort{o.after.dst, o.after.src}) {
			entry = fmt.Sprintf("offload: %s and %s, %s", e.Sides[0], e.Sides[1], e.State)
		}
	}
	switch {
	case o.after.ttl < o.before.ttl:
		w.tell("offload", entry, "bypasses the host's stack")
	case o.verdict == loader.VerdictRedirect:
	case entry != "":
		w.tell("offload", entry, "not for this packet: the host's stack decides")
	default:
		w.tell("offload", "", "none: the host's stack decides")
	}
}

// tellTranslation tells how addresses and ports have changed, and which flow says so.
func (w *walker) tellTranslation(o *outcome) {
	if o.after.src == o.before.src && o.after.dst == o.before.dst {
		return
	}
	entry := ""
	if f, ok := o.flow(bpf.FlowSNAT, bpf.FlowDNAT); ok {
		entry = f.String()
	}
	if o.after.src != o.before.src {
		w.tell("translation", entry, "source %s becomes %s", maps.AddrPortText(o.before.src), maps.AddrPortText(o.after.src))
	}
	if o.after.dst != o.before.dst {
		if o.after.src != o.before.src {
			entry = ""
		}
		w.tell("translation", entry, "destination %s becomes %s", maps.AddrPortText(o.before.dst), maps.AddrPortText(o.after.dst))
	}
}

// whyNot explains that a packet leaves under its own source.
func (w *walker) whyNot(p packet) string {
	endpoint, isContainer := w.endpoints[p.src.Addr()]
	switch {
	case !isContainer:
		return "none: no container's packet"
	case !endpoint.Masq:
		return "none: ipMasq is off for " + w.ownerName(endpoint.Owner)
	case endpoint.NonMasq != 0:
		return "none: to an address that is not masqueraded, or a reply"
	default:
		return "none"
	}
}

// tellClaim tells that the host keeps a tuple for itself.
func (w *walker) tellClaim(o *outcome) {
	for _, f := range o.flows {
		if !o.withoutIngress && f.isNew && f.Kind == bpf.FlowSNAT && f.Owner == 0 && f.Remote == o.after.dst {
			w.tell("claim", f.String(), "replies are the host's")
		}
	}
}

// tellPolicy explains why the packet may enter the container, and returns whether the entries say so, too.
func (w *walker) tellPolicy(o *outcome, d maps.Device, ingress int) (isAdmitted bool) {
	sender, isContainer := w.devices[ingress]
	name := w.ownerName(d.Owner)
	what := ""
	switch {
	case ingress == 0:
		what = "passes: the host always may"
	case d.IngressPolicy == maps.Open:
		what = "passes: ingressPolicy open"
	case !isContainer:
		what = "passes: the outside always may"
	case sender.Container == d.Container, d.IngressPolicy == maps.SameNetwork && sender.Network == d.Network:
		what = fmt.Sprintf("passes: ingressPolicy %s admits the sender", d.IngressPolicy)
	}
	reply, isReply := o.flow(bpf.FlowEgress)
	isReply = isReply && o.before.tcpFlags != tcpSYN && reply.Local.Addr() == o.after.dst.Addr()
	switch {
	case what != "":
		w.tell("policy", name, "%s", what)
	case isReply:
		w.tell("policy", reply.String(), "passes: a reply, which ingressPolicy %s admits", d.IngressPolicy)
	case o.withoutIngress:
		w.tell("policy", name, "drops it, by ingressPolicy %s: told by the entries, since the kernel runs no test of it before Linux 6.1", d.IngressPolicy)
		return false
	default: // the program is right
		w.tell("policy", name, "passes, although ingressPolicy %s seems not to admit the sender: trace does not know why", d.IngressPolicy)
	}
	return true
}

// tellHostPort names the host port that the packet was for.
func (w *walker) tellHostPort(o *outcome) {
	port, ok := w.hostPort(o.before)
	if !ok {
		return
	}
	what := "is this packet's"
	switch {
	case o.drop != nil:
		what = "does not get this packet"
	case o.after.dst != netip.AddrPortFrom(port.ContainerAddr, port.ContainerPort):
		what = "is not asked: the packet is another connection's, or for no address of the host"
	}
	w.tell("host port", fmt.Sprintf("%s, of %s", port, w.ownerName(port.Owner)), "%s", what)
}

// hostPort returns the host port of a packet's destination: an exact address takes precedence.
func (w *walker) hostPort(p packet) (found maps.HostPort, ok bool) {
	for _, port := range w.ports {
		if port.HostPort != p.dst.Port() || port.Protocol != p.protocol || port.HostAddr.Is4() != p.dst.Addr().Is4() {
			continue
		}
		if port.HostAddr == p.dst.Addr() {
			return port, true
		}
		if port.HostAddr.IsUnspecified() {
			found, ok = port, true
		}
	}
	return found, ok
}

// gatewayOf returns the gateway of the container's most specific route to an address, if it is not the host.
func (w *walker) gatewayOf(d maps.Device, to netip.Addr) (gateway netip.Addr) {
	longest := -1
	for _, route := range w.routes[d.Routes] {
		if d.Routes != 0 && route.To.Contains(to) && route.To.Bits() > longest {
			longest, gateway = route.To.Bits(), route.Gateway
		}
	}
	return gateway
}

// tellGateway tells a route of the container with a gateway of its own.
func (w *walker) tellGateway(o *outcome, d maps.Device) {
	gateway := w.gatewayOf(d, o.before.dst.Addr())
	if !gateway.IsValid() {
		return
	}
	w.tell("gateway", "", "the container's route is by %s", w.who(gateway))
}

func (w *walker) tellWithoutEthernet(device int) {
	if l := w.links[device]; l != nil && len(l.Attrs().HardwareAddr) == 0 && device != loopback {
		w.tell("device", "", "has no Ethernet: told by the program for devices that have, since a test run needs it")
	}
}
