package admin

import (
	"cmp"
	"fmt"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// setPolicy adds what isolates the container behind a device.
func (a *Attachment) setPolicy(datapath *loader.Datapath, device maps.Device) error {
	entry, err := maps.GetPolicy(datapath, device.Policy)
	if err != nil {
		return err
	}
	ingress, err := ingressPolicyOf(datapath, entry, device.Network)
	a.IngressPolicy = ingress.String()
	if ingress == policy.Open && !entry.IsEmpty() {
		a.IngressPolicy = "rules"
	}
	if entry.IsAudit() {
		a.PolicyMode = "audit"
	}
	return err
}

// ingressPolicyOf returns which ingressPolicy the rules of a container in a network are; policy.Open also for those of
// a policy.
func ingressPolicyOf(datapath *loader.Datapath, entry maps.Policy, network maps.Network) (policy.IngressPolicy, error) {
	for _, known := range []policy.IngressPolicy{policy.SameNetwork, policy.Isolated} {
		isKnown, err := maps.RefersTo(datapath, entry.Ingress, policy.FromIngressPolicy(known, network))
		if err != nil {
			return policy.Open, err
		}
		if isKnown && entry.Egress == 0 {
			return known, nil
		}
	}
	return policy.Open, nil
}

// Policy is what isolates a container.
type Policy struct {
	Named
	Mode    string     `json:"mode,omitempty"`    // enforce or audit; "": nothing isolates it
	Ingress *Direction `json:"ingress,omitempty"` // nil: not isolated
	Egress  *Direction `json:"egress,omitempty"`
}

// DirectionOf returns the word for a direction, as seen from a container.
func DirectionOf(isEgress bool) string {
	if isEgress {
		return "egress"
	}
	return "ingress"
}

// Direction is what one direction of a container admits.
type Direction struct {
	Host     bool                `json:"host"`               // the own node, always
	Policies []string            `json:"policies,omitempty"` // NetworkPolicies that isolate it, such as shop/web
	Rules    []policy.Decompiled `json:"rules"`
}

// Policies reads what isolates containers, in the words of the key policy, or of NetworkPolicy. all are the host's
// attachments, whose networks have names.
func Policies(datapath *loader.Datapath, attachments, all []*Attachment) ([]Policy, error) {
	list, explainer := []Policy{}, NewExplainer(datapath, nil, nodestate.Default)
	names := map[maps.Network]string{}
	for _, a := range all {
		names[maps.NetworkToken(a.Network)] = a.Network
	}
	nameOf := func(network maps.Network) string {
		if name := names[network]; name != "" {
			return name
		}
		return fmt.Sprintf("%08x", uint32(network))
	}
	for _, a := range attachments {
		p := Policy{Named: a.Named}
		entry, err := explainer.PolicyOf(a)
		if err != nil {
			return list, err
		}
		ingress, egress, err := explainer.sets.Of(entry)
		if err != nil {
			return list, err
		}
		if !entry.IsEmpty() {
			p.Mode = map[bool]string{false: "enforce", true: "audit"}[entry.IsAudit()]
		}
		for isEgress, set := range map[bool]*maps.RuleSet{false: ingress, true: egress} {
			from, err := explainer.objects.of(entry, isEgress)
			if err != nil {
				return list, err
			}
			p.Name = cmp.Or(p.Name, from.pod)
			if direction := from.direction(set, nameOf); isEgress {
				p.Egress = direction
			} else {
				p.Ingress = direction
			}
		}
		list = append(list, p)
	}
	return list, nil
}
