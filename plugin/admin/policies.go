package admin

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
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
	if ingress == maps.Open && !entry.IsEmpty() {
		a.IngressPolicy = "rules"
	}
	if entry.IsAudit() {
		a.PolicyMode = "audit"
	}
	return err
}

// ingressPolicyOf returns which ingressPolicy the rules of a container in a network are; maps.Open also for those of
// a policy.
func ingressPolicyOf(datapath *loader.Datapath, entry maps.Policy, network maps.Network) (maps.IngressPolicy, error) {
	for _, known := range []maps.IngressPolicy{maps.SameNetwork, maps.Isolated} {
		isKnown, err := maps.RefersTo(datapath, entry.Ingress, policy.FromIngressPolicy(known, network))
		if err != nil {
			return maps.Open, err
		}
		if isKnown && entry.Egress == 0 {
			return known, nil
		}
	}
	return maps.Open, nil
}

// Policy is what isolates a container.
type Policy struct {
	Named
	Owner   string     `json:"owner"`
	Mode    string     `json:"mode,omitempty"`    // enforce or audit; "": nothing isolates it
	Ingress *Direction `json:"ingress,omitempty"` // nil: not isolated
	Egress  *Direction `json:"egress,omitempty"`
}

// Direction is what one direction of a container admits.
type Direction struct {
	Host  bool                `json:"host"` // the own node, always
	Rules []policy.Decompiled `json:"rules"`
}

// Policies reads what isolates containers, in the words of the key policy. all are the host's attachments, whose
// networks have names.
func Policies(datapath *loader.Datapath, attachments, all []*Attachment) ([]Policy, error) {
	list := []Policy{}
	policies, err := maps.Policies(datapath)
	if err != nil {
		return list, err
	}
	byOwner := map[string]maps.Policy{}
	for _, p := range policies {
		byOwner[p.Owner.String()] = p
	}
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
	sets := maps.NewRuleSets(datapath)
	for _, a := range attachments {
		p := Policy{Named: a.Named, Owner: a.Owner}
		entry := byOwner[a.Owner]
		ingress, egress, err := sets.Of(entry)
		if err != nil {
			return list, err
		}
		if !entry.IsEmpty() {
			p.Mode = map[bool]string{false: "enforce", true: "audit"}[entry.IsAudit()]
		}
		p.Ingress, p.Egress = directionOf(ingress, false, nameOf), directionOf(egress, true, nameOf)
		list = append(list, p)
	}
	return list, nil
}

func directionOf(set *maps.RuleSet, isEgress bool, nameOf func(maps.Network) string) *Direction {
	if set == nil {
		return nil
	}
	return &Direction{set.Host, policy.Decompile(set, isEgress, nameOf)}
}

// Explainer says why rules admit connections or not. It keeps what it reads.
type Explainer struct {
	datapath *loader.Datapath
	host     *netlink.Handle
	sets     *maps.RuleSets
}

// NewExplainer returns an explainer, which uses a datapath and netlink.
func NewExplainer(datapath *loader.Datapath, host *netlink.Handle) *Explainer {
	return &Explainer{datapath, host, maps.NewRuleSets(datapath)}
}

// Judgment is what one direction of a container says about a connection.
type Judgment struct {
	IsIsolated bool // else it admits everything
	Admits     bool
	IsAudit    bool // what it does not admit passes
	Why        string
}

// Judge judges a connection by the rules in one direction, as they are now. The programs may know more, such as
// that the packet is a reply.
func (e *Explainer) Judge(entry maps.Policy, isEgress bool, c policy.Connection) (j Judgment, err error) {
	ingress, egress, err := e.sets.Of(entry)
	if err != nil {
		return j, err
	}
	set := ingress
	if isEgress {
		set = egress
	}
	j.IsIsolated, j.IsAudit = set != nil, set != nil && set.Audit
	j.Admits, j.Why = policy.Explain(set, isEgress, c)
	return j, nil
}

// PolicyOf returns the policy of an attachment.
func (e *Explainer) PolicyOf(owner loader.Owner) (maps.Policy, error) {
	policies, err := maps.Policies(e.datapath)
	for _, p := range policies {
		if p.Owner == owner {
			return p, err
		}
	}
	return maps.Policy{}, err
}

// PeerOf returns the peer with an address.
func (e *Explainer) PeerOf(addr netip.Addr) (peer maps.Peer, err error) {
	if peer.Addr = addr; !addr.IsValid() {
		return peer, nil
	}
	if peer.Class, err = maps.PeerClass(e.datapath, addr); err != nil {
		return peer, err
	}
	endpoint, isContainer, err := maps.GetEndpoint(e.datapath, addr)
	if isContainer {
		peer.Network = endpoint.Network
		return peer, err
	}
	routes, errRoute := e.host.RouteGet(addr.AsSlice()) // an address without a route is not the host's
	peer.Host = errRoute == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
	return peer, err
}
