package maps

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// RefersTo reports whether a reference is to an equal rule set; whether either is in audit mode does not matter.
func RefersTo(dp *loader.Datapath, ref RuleSetRef, set *RuleSet) (bool, error) {
	if ref == 0 || set == nil {
		return ref == 0 && set == nil, nil
	}
	set.Normalize()
	if (bpf.RuleSetFlags(ref)^set.flags())&(bpf.RuleSetAudit-1) != 0 {
		return false, nil
	}
	digest, err := digestOf(dp, ref)
	return digest == set.Digest(), err
}

// digestOf returns the digest of the rule set that a reference is to, or zeros if there is none.
func digestOf(dp *loader.Datapath, ref RuleSetRef) ([16]byte, error) {
	if err := dp.OpenOnDemand(bpf.MapRuleSets); err != nil {
		return [16]byte{}, err
	}
	var known bpf.RuleSet
	if err := dp.RuleSets.Lookup(ref.id(), &known); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return [16]byte{}, fmt.Errorf("look up a rule set: %w", err)
	}
	return known.Digest, nil
}

// PeerClass returns the class of a pod's address, or 0.
func PeerClass(dp *loader.Datapath, addr netip.Addr) (class uint32, err error) {
	if err := dp.OpenOnDemand(bpf.MapPeerClasses); err != nil || dp.PeerClasses == nil {
		return 0, err
	}
	key := wireAddr(addr)
	if err := dp.PeerClasses.Lookup(&key, &class); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return 0, fmt.Errorf("look up the class of %s: %w", addr, err)
	}
	return class, nil
}

// RuleSets has the rule sets of the maps as they were read; it reads them again for one that is new.
type RuleSets struct {
	dp    *loader.Datapath
	known map[knownRuleSet]*RuleSet
}

// knownRuleSet identifies a rule set also after its id was given to another one.
type knownRuleSet struct {
	id     uint32
	digest [16]byte
}

// NewRuleSets returns an empty cache.
func NewRuleSets(dp *loader.Datapath) *RuleSets { return &RuleSets{dp: dp} }

// Of returns the rule sets of a policy; nil: the direction is not isolated. Rules come back as their entries: a rule
// for a range of ports is one for each prefix of it.
func (r *RuleSets) Of(policy Policy) (ingress, egress *RuleSet, err error) {
	if ingress, err = r.of(policy.Ingress); err != nil {
		return nil, nil, err
	}
	egress, err = r.of(policy.Egress)
	return ingress, egress, err
}

func (r *RuleSets) of(ref RuleSetRef) (*RuleSet, error) {
	if ref == 0 {
		return nil, nil
	}
	digest, err := digestOf(r.dp, ref)
	if err != nil {
		return nil, err
	}
	key := knownRuleSet{ref.id(), digest}
	if r.known[key] == nil {
		all, err := readRuleSets(r.dp)
		if err != nil {
			return nil, err
		}
		r.known = map[knownRuleSet]*RuleSet{key: {}}
		for id, set := range all {
			if digest, err := digestOf(r.dp, RuleSetRef(id<<ruleSetShift)); err == nil {
				r.known[knownRuleSet{id, digest}] = set
			}
		}
	}
	return r.known[key].under(ref), nil
}

// under returns the rule set with the flags of a reference.
func (r *RuleSet) under(ref RuleSetRef) *RuleSet {
	set, flags := *r, bpf.RuleSetFlags(ref)
	set.Host, set.Audit = flags&bpf.RuleSetHost != 0, flags&bpf.RuleSetAudit != 0
	return &set
}

// readRuleSets reads all rule sets by their ids, without the flags. Those that admit nothing are missing.
func readRuleSets(dp *loader.Datapath) (map[uint32]*RuleSet, error) {
	if err := dp.OpenOnDemand(bpf.MapPolicyRules, bpf.MapPolicyBlocks); err != nil {
		return nil, err
	}
	sets := map[uint32]*RuleSet{}
	of := func(id uint32) *RuleSet {
		if sets[id] == nil {
			sets[id] = &RuleSet{}
		}
		return sets[id]
	}
	for entry, err := range entries[bpf.RuleKey, bpf.Rule](dp.PolicyRules) {
		if err != nil {
			return nil, err
		}
		set := of(entry.key.Set)
		set.Rules = append(set.Rules, ruleOf(entry.key, entry.value.Number))
	}
	for entry, err := range entries[bpf.PrefixKey, uint32](dp.PolicyBlocks) {
		if err != nil {
			return nil, err
		}
		set := of(entry.key.Set)
		set.Blocks = append(set.Blocks, Block{prefixOf(entry.key), entry.value})
	}
	for _, set := range sets {
		set.Normalize()
	}
	return sets, nil
}
