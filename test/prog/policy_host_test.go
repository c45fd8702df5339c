package prog

import (
	"errors"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
)

// podPolicy is the index of the pod's policy.
const podPolicy = 1

// isolated is ingressPolicy isolated: the outside and the host may open connections.
var isolated = &maps.RuleSet{Host: true, Rules: []maps.Rule{{Kind: maps.OutsidePeer}}}

// allChecks is entry 0 of policies: packets get every check.
var allChecks = bpf.Policy{Checks: bpf.PolicyCheckAny | bpf.PolicyCheckHost}

// putPolicy gives the pod rule sets; nil: the direction is not isolated.
func (h *host) putPolicy(ingress, egress *maps.RuleSet) error {
	rules, blocks := h.programs.Maps[bpf.MapPolicyRules], h.programs.Maps[bpf.MapPolicyBlocks]
	err := errors.Join(empty[bpf.RuleKey, bpf.Rule](rules), empty[bpf.PrefixKey, uint32](blocks))
	h.policies++
	var refs [2]maps.RuleSetRef
	for i, set := range []*maps.RuleSet{ingress, egress} {
		if set != nil {
			id := uint32(i + 1)
			refs[i] = set.Ref(id)
			err = errors.Join(err, set.Write(id, rules, blocks))
		}
	}
	policies := h.programs.Maps[bpf.MapPolicies]
	policy := bpf.Policy{Owner: owners["pod"], RuleSets: uint64(refs[1])<<32 | uint64(refs[0]), Generation: h.policies}
	return errors.Join(err, policies.Put(uint32(0), allChecks), policies.Put(uint32(podPolicy), policy))
}
