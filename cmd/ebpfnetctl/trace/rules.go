package trace

import (
	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

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

var directions = map[bool]string{false: "ingress", true: "egress"}

func (w *walker) reportRule(p packet, of maps.Device, isEgress bool) error {
	judged, err := w.judge(p, of, isEgress)
	switch container := w.ownerName(of.Owner); {
	case err != nil || !judged.IsIsolated:
	case judged.Admits:
		w.step("policy", "%s of %s: %s", directions[isEgress], container, judged.Why)
	case judged.IsAudit:
		w.step("policy", "%s of %s would refuse it, without audit mode: %s", directions[isEgress], container, judged)
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
