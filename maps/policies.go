package maps

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// PolicyIndex is the place of a container's policy. A device has it; 0: the container has no rules.
type PolicyIndex uint16

// Policy is a container's policy as the programs have it.
type Policy struct {
	Index           PolicyIndex
	Owner           loader.Owner
	Ingress, Egress RuleSetRef
	IsPod           bool // the owner is a pod: PodToken
}

// RuleSetRef refers to a rule set in the maps; 0: the direction is not isolated.
type RuleSetRef uint32

// Of bpf/abi_policy.h.
const (
	ruleSetShift = 8       // RULE_SET_SHIFT
	anyProtocol  = 72      // RULE_ANY_PROTOCOL: bits of a key
	anyPort      = 80      // RULE_ANY_PORT
	maxRuleSetID = 1 << 24 // exclusive
)

func (r RuleSetRef) id() uint32 { return uint32(r) >> ruleSetShift }

// policies is the map of that name, as memory that the programs read. Words change at once, and one by one.
type policies []bpf.Policy

// mapPolicies maps the policies; of a datapath with another map layout, none.
func mapPolicies(dp *loader.Datapath) (policies, error) {
	memory, err := dp.MapPolicies()
	if memory == nil {
		return make(policies, 1), err
	}
	return unsafe.Slice((*bpf.Policy)(unsafe.Pointer(&memory[0])), dp.Policies.MaxEntries()), nil
}

// find returns the owner's entry, or else a free one. It returns nil if all are in use.
func (p policies) find(owner loader.Owner) (index PolicyIndex, entry *bpf.Policy) {
	for i := 1; i < len(p); i++ {
		e := &p[i]
		if loader.Owner(e.Owner) == owner {
			return PolicyIndex(i), e
		}
		if entry == nil && e.Owner == 0 {
			index, entry = PolicyIndex(i), e
		}
	}
	return index, entry
}

// check makes the programs look for what the reference needs; they do not forget it.
func (p policies) check(ingress, egress RuleSetRef) {
	host, checks := &p[0], bpf.PolicyChecks(0)
	if ingress|egress != 0 {
		checks |= bpf.PolicyCheckAny
	}
	for _, ref := range []RuleSetRef{ingress, egress} {
		if ref != 0 && bpf.RuleSetFlags(ref)&bpf.RuleSetHost == 0 {
			checks |= bpf.PolicyCheckHost
		}
	}
	if host.Checks&checks != checks {
		atomic.OrUint32((*uint32)(&host.Checks), uint32(checks))
	}
}

// PutPolicy gives an owner's container rule sets; nil: the direction is not isolated. One store switches both.
// Connections that the container had, and that its new rules do not admit, end with their next packets. It
// returns the index for the container's device, which the caller writes afterwards.
func (s *Store) PutPolicy(owner loader.Owner, ingress, egress *RuleSet) (PolicyIndex, error) {
	indexes, err := s.putPolicies([]OwnPolicy{{owner, ingress, egress}}, 0)
	return indexes[owner], err
}

// OwnPolicy is the rule sets for an owner's container.
type OwnPolicy struct {
	Owner           loader.Owner
	Ingress, Egress *RuleSet
}

// putPolicies is PutPolicy for several owners; one that does not fit stops no other. An entry that is new has the flag, or 0.
func (s *Store) putPolicies(wanted []OwnPolicy, flag bpf.PolicyChecks) (indexes map[loader.Owner]PolicyIndex, err error) {
	all, err := mapPolicies(s.dp)
	if err != nil {
		return nil, err
	}
	indexes = map[loader.Owner]PolicyIndex{}
	refs, errs := map[*RuleSet]RuleSetRef{nil: 0}, map[*RuleSet]error{} // owners share them
	var errFull error
	for _, policy := range wanted {
		index, entry := all.find(policy.Owner)
		if entry == nil {
			errFull = fmt.Errorf("%w: %d containers have rules", ErrFull, len(all)-1)
			continue
		}
		for _, set := range []*RuleSet{policy.Ingress, policy.Egress} {
			if _, isKnown := refs[set]; !isKnown {
				refs[set], errs[set] = s.putRuleSet(set)
			}
		}
		if errors.Join(errs[policy.Ingress], errs[policy.Egress]) != nil {
			continue
		}
		if all.set(entry, policy.Owner, [2]RuleSetRef{refs[policy.Ingress], refs[policy.Egress]}, flag) {
			s.revoked, s.hasUnused = append(s.revoked, entry), true
		}
		indexes[policy.Owner] = index
	}
	err = errors.Join(append(slices.Collect(maps.Values(errs)), errFull)...)
	s.hasUnused = s.hasUnused || err != nil // rule sets whose policy does not fit
	return indexes, err
}

// set writes an entry, and reports whether the owner had other rule sets in it.
func (p policies) set(entry *bpf.Policy, owner loader.Owner, refs [2]RuleSetRef, flag bpf.PolicyChecks) bool {
	sets, isKnown := uint64(refs[1])<<32|uint64(refs[0]), loader.Owner(entry.Owner) == owner
	if isKnown && entry.RuleSets == sets {
		return false
	}
	p.check(refs[0], refs[1])
	atomic.StoreUint64(&entry.RuleSets, sets)
	atomic.AddUint32(&entry.Generation, 1)
	if !isKnown {
		atomic.StoreUint32((*uint32)(&entry.Checks), uint32(flag))
		atomic.StoreUint64(&entry.Owner, uint64(owner))
	}
	return isKnown
}

// finishPolicies removes unused rule sets once no program reads them. New ones take effect earlier. But where CPUs reorder
// loads (reordersLoads), a program may have judged a connection by what was there before, and noted the new generation. So
// finishPolicies waits for the programs that run, and starts one more generation, in which they judge again.
func (s *Store) finishPolicies() error {
	if len(s.revoked) > 0 {
		if err := loader.WaitForPrograms(); err != nil {
			return err
		}
	}
	for _, entry := range s.revoked {
		atomic.AddUint32(&entry.Generation, 1)
	}
	if !s.hasUnused {
		return nil
	}
	all, err := mapPolicies(s.dp)
	if err != nil {
		return err
	}
	return s.removeUnusedRuleSets(all)
}

// freePolicies frees the entries of owners that are attachments. Their rules stay in force until another container gets
// the entry.
func (s *Store) freePolicies(owned func(loader.Owner) bool) error {
	return s.freeEntries(func(_ PolicyIndex, entry *bpf.Policy) bool {
		return entry.Checks&bpf.PolicyPod == 0 && owned(loader.Owner(entry.Owner))
	})
}

func (s *Store) freeEntries(isFreed func(PolicyIndex, *bpf.Policy) bool) (err error) {
	all, err := mapPolicies(s.dp)
	if err != nil {
		return err
	}
	for i := 1; i < len(all); i++ {
		if entry := &all[i]; entry.Owner != 0 && isFreed(PolicyIndex(i), entry) {
			atomic.StoreUint64(&entry.Owner, 0)
			s.hasUnused = true
		}
	}
	return nil
}

// Policies lists the policies of all containers that have rules.
func Policies(dp *loader.Datapath) (list []Policy, err error) {
	all, err := mapPolicies(dp)
	if err != nil {
		return nil, err
	}
	for i, entry := range all[1:] {
		if entry.Owner != 0 {
			list = append(list, policyOf(PolicyIndex(i+1), entry))
		}
	}
	return list, nil
}

// GetPolicy returns the policy with an index; for 0, one without rules.
func GetPolicy(dp *loader.Datapath, index PolicyIndex) (Policy, error) {
	if index == 0 {
		return Policy{}, nil
	}
	if err := dp.OpenOnDemand(bpf.MapPolicies); err != nil || dp.Policies == nil {
		return Policy{}, err
	}
	var entry bpf.Policy
	if err := dp.Policies.Lookup(uint32(index), &entry); err != nil {
		return Policy{}, fmt.Errorf("look up policy %d: %w", index, err)
	}
	return policyOf(index, entry), nil
}

// IsEmpty reports whether the rules isolate neither direction.
func (p Policy) IsEmpty() bool { return p.Ingress == 0 && p.Egress == 0 }

// IsAudit reports whether what the rules do not admit passes.
func (p Policy) IsAudit() bool {
	return bpf.RuleSetFlags(p.Ingress|p.Egress)&bpf.RuleSetAudit != 0
}

func policyOf(index PolicyIndex, entry bpf.Policy) Policy {
	return Policy{index, loader.Owner(entry.Owner), RuleSetRef(entry.RuleSets), RuleSetRef(entry.RuleSets >> 32), entry.Checks&bpf.PolicyPod != 0}
}

// putRuleSet writes a rule set, unless an equal one exists.
func (s *Store) putRuleSet(set *RuleSet) (RuleSetRef, error) {
	if err := s.dp.OpenOnDemand(bpf.MapRuleSets, bpf.MapPolicyRules, bpf.MapPolicyBlocks); err != nil {
		return 0, err
	}
	set.Normalize()
	digest := set.Digest()
	id := binary.LittleEndian.Uint32(digest[:]) % maxRuleSetID
	for {
		var known bpf.RuleSet
		err := s.dp.RuleSets.Lookup(id, &known)
		if errors.Is(err, ebpf.ErrKeyNotExist) && id != 0 {
			break
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return 0, fmt.Errorf("look up a rule set: %w", err)
		}
		if err == nil && known.Digest == digest {
			return set.Ref(id), nil
		}
		id = (id + 1) % maxRuleSetID
	}
	// Until it is complete, it has no digest, so nobody shares it.
	if err := s.dp.RuleSets.Put(id, &bpf.RuleSet{}); err != nil {
		return 0, fmt.Errorf("put a rule set: %w", explainFull(s.dp.RuleSets, err))
	}
	if err := set.Write(id, s.dp.PolicyRules, s.dp.PolicyBlocks); err != nil {
		return 0, errors.Join(err, s.removeRuleSets(map[uint32]bool{id: true}))
	}
	if err := s.dp.RuleSets.Put(id, &bpf.RuleSet{Digest: digest, Flags: set.flags()}); err != nil {
		return 0, fmt.Errorf("put a rule set: %w", err)
	}
	return set.Ref(id), nil
}

// Ref returns the reference to the rule set under an id.
func (r *RuleSet) Ref(id uint32) RuleSetRef {
	return RuleSetRef(id<<ruleSetShift | uint32(r.flags()))
}

func (r *RuleSet) flags() (flags bpf.RuleSetFlags) {
	for _, rule := range r.Rules {
		flags |= 1 << rule.Kind
	}
	if r.Host {
		flags |= bpf.RuleSetHost
	}
	if r.Audit {
		flags |= bpf.RuleSetAudit
	}
	return flags
}

// Write puts the rule set under an id into the maps policy_rules and policy_blocks.
func (r *RuleSet) Write(id uint32, rules, blocks *ebpf.Map) error {
	var keys []bpf.RuleKey
	var numbers []bpf.Rule
	for _, rule := range r.Rules {
		for _, key := range ruleKeys(id, rule) {
			keys, numbers = append(keys, key), append(numbers, bpf.Rule{Number: rule.Number})
		}
	}
	prefixes, values := make([]bpf.PrefixKey, len(r.Blocks)), make([]uint32, len(r.Blocks))
	for i, block := range r.Blocks {
		prefixes[i], values[i] = prefixKey(PrefixSet(id), block.Prefix), block.Number
	}
	if err := putAll(rules, keys, numbers); err != nil {
		return err
	}
	return putAll(blocks, prefixes, values)
}

// putAll puts entries into a map, an LPM trie by one call where the kernel can (5.13).
func putAll[K, V any](m *ebpf.Map, keys []K, values []V) error {
	if len(keys) == 0 {
		return nil
	}
	_, err := m.BatchUpdate(keys, values, nil)
	if errors.Is(err, ebpf.ErrNotSupported) {
		err = nil
		for i := 0; i < len(keys) && err == nil; i++ {
			err = m.Put(&keys[i], &values[i])
		}
	}
	if err != nil {
		return fmt.Errorf("put into %v: %w", m, explainFull(m, err))
	}
	return nil
}

// ruleKeys returns the keys of a rule's entries: one for each prefix of its ports.
func ruleKeys(id uint32, rule Rule) (keys []bpf.RuleKey) {
	key := bpf.RuleKey{Set: id, Peer: rule.Peer, Kind: bpf.PeerKind(rule.Kind), Protocol: rule.Protocol}
	if rule.Protocol == 0 {
		key.Prefixlen = anyProtocol
		return []bpf.RuleKey{key}
	}
	for _, ports := range PortPrefixes(rule.First, rule.Last) {
		key.Prefixlen = anyPort + uint32(ports.Bits)
		binary.BigEndian.PutUint16(key.Port[:], ports.Port)
		keys = append(keys, key)
	}
	return keys
}

// removeUnusedRuleSets removes the rule sets that no policy refers to, also those that a killed process has
// not completed.
func (s *Store) removeUnusedRuleSets(all policies) error {
	if err := s.dp.OpenOnDemand(bpf.MapRuleSets, bpf.MapPolicyRules, bpf.MapPolicyBlocks); err != nil {
		return err
	}
	used := map[uint32]bool{}
	for _, entry := range all[1:] {
		if entry.Owner != 0 {
			used[RuleSetRef(entry.RuleSets).id()] = true
			used[RuleSetRef(entry.RuleSets>>32).id()] = true
		}
	}
	unused := map[uint32]bool{}
	for entry, err := range entries[uint32, bpf.RuleSet](s.dp.RuleSets) {
		if err != nil {
			return err
		}
		if !used[entry.key] {
			unused[entry.key] = true
		}
	}
	return s.removeRuleSets(unused)
}

func (s *Store) removeRuleSets(ids map[uint32]bool) error {
	if len(ids) == 0 {
		return nil
	}
	// First the digests: nobody shares what a killed process has removed in part.
	if err := putAll(s.dp.RuleSets, slices.Collect(maps.Keys(ids)), make([]bpf.RuleSet, len(ids))); err != nil {
		return err
	}
	isRemoved := func(id uint32) bool { return ids[id] }
	if err := errors.Join(removeIf(s.dp.PolicyRules, isRemoved, setOf), removeIf(s.dp.PolicyBlocks, isRemoved, setOf)); err != nil {
		return err // the rest of the entries must not become another rule set's
	}
	return removeIf(s.dp.RuleSets, isRemoved, func(id, _ []byte) uint32 { return binary.NativeEndian.Uint32(id) })
}

// ruleOf is the inverse of ruleKeys.
func ruleOf(key bpf.RuleKey, number uint32) Rule {
	rule := Rule{Kind: PeerKind(key.Kind), Peer: key.Peer, Protocol: key.Protocol, Last: 65535, Number: number}
	if key.Prefixlen > anyPort {
		rule.First = binary.BigEndian.Uint16(key.Port[:])
		rule.Last = rule.First | uint16(1<<(anyPort+16-key.Prefixlen)-1)
	}
	return rule
}
