package drops

import (
	"cmp"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// addRules adds which rule set of a container does not admit the packet, and the rule that nearly does. It judges
// the packet by the rules as they are now.
func (d *Describer) addRules(drop *Drop, e *bpf.DropEvent, p packet, of *admin.Attachment) error {
	isEgress := of.HasAddress(p.src.Addr()) || drop.Hook == bpf.ProgFromContainer && drop.Device == of.Device
	switch reason := bpf.Reason(e.Reason); {
	case e.ByStack != 0:
		return nil
	case reason == bpf.ReasonPolicyEgress:
		isEgress = true
	case reason == bpf.ReasonPolicyIngress:
		isEgress = false
	case reason != bpf.ReasonPolicyAudit:
		return nil
	}
	drop.RuleSet = map[bool]string{false: "ingress", true: "egress"}[isEgress]
	hasPorts := p.number == maps.TCP || p.number == maps.UDP || p.number == maps.SCTP
	switch {
	case p.isError:
		drop.Why = "an ICMP error about no connection that the rules admit"
		return nil
	case hasPorts && !p.hasPorts:
		drop.Why = "a fragment without ports"
		return nil
	}
	entry, err := d.rules.PolicyOf(of)
	if err != nil {
		return err
	}
	c := policy.Connection{Protocol: p.number, Port: p.dst.Port()}
	if isEgress {
		c.Peer, err = d.rules.PeerOf(p.dst.Addr())
	} else {
		c.Port = of.PortBehind(p.protocol, p.dst)
		c.Peer, err = d.senderOf(e, p)
	}
	if err != nil {
		return err
	}
	judged, err := d.rules.Judge(entry, isEgress, c)
	drop.Policies, drop.Name = judged.Policies, cmp.Or(drop.Name, judged.Pod)
	if drop.Why = judged.Why; judged.Admits {
		drop.Why = "by now: " + judged.Why
	}
	return err
}

// senderOf returns the sender as the programs know it: by the device that the packet has come from.
func (d *Describer) senderOf(e *bpf.DropEvent, p packet) (peer maps.Peer, err error) {
	if peer, err = d.rules.PeerOf(p.src.Addr()); err != nil {
		return peer, err
	}
	device, isContainer, err := maps.GetDevice(d.datapath, int(e.IngressIfindex))
	if peer.Host = e.IngressIfindex == 0; isContainer {
		peer.Network = device.Network
	}
	return peer, err
}
