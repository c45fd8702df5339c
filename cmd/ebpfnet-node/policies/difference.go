package policies

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/loader"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// Present is what the datapath has.
type Present struct {
	Pods      map[loader.Owner]*Rules // by ebpfmaps.PodToken; nil: unknown ones, of an earlier agent
	Names     map[loader.Owner]string // of pods
	Own       map[netip.Addr]loader.Owner
	Released  map[loader.Owner]bool
	Classes   map[netip.Addr]uint32
	Selectors map[uint32][]nodestate.Selector
	IsUnused  bool // no namespace has policies, so all pods are released
}

// Rules returns the objects that the rules of pods come from.
func (p *Present) Rules() nodestate.Rules {
	file := nodestate.Rules{Rules: []nodestate.ObjectRule{}, Lists: []nodestate.RuleList{}, Pods: map[string]nodestate.PodRules{}, Classes: p.Selectors}
	places, lists := map[*rule]int{}, map[*Rules]int{}
	for _, owner := range slices.Sorted(maps.Keys(p.Pods)) { // equal rules have an equal file
		rules := p.Pods[owner]
		first, isKnown := lists[rules]
		if !isKnown {
			first = len(file.Lists)
			lists[rules] = first
			for direction, from := range rules.Sources {
				list := from.list(&file, places)
				if set := rules.Sets[direction]; set != nil {
					list.Denied = set.Denied
				}
				file.Lists = append(file.Lists, list)
			}
		}
		file.Pods[owner.String()] = nodestate.PodRules{Name: p.Names[owner], Lists: [2]int{first, first + 1}}
	}
	return file
}

// list adds the rules that the file has not yet.
func (s *source) list(file *nodestate.Rules, places map[*rule]int) nodestate.RuleList {
	list := nodestate.RuleList{Policies: s.policies, Rules: []int{}}
	for _, r := range s.rules {
		place, isKnown := places[r]
		if !isKnown {
			place = len(file.Rules)
			places[r], file.Rules = place, append(file.Rules, r.object())
		}
		list.Rules = append(list.Rules, place)
	}
	return list
}

// object returns the rule as its object has it.
func (r *rule) object() nodestate.ObjectRule {
	object := nodestate.ObjectRule{Name: r.name, Action: r.action.String(), Any: r.anyPeer}
	for _, t := range r.terms {
		object.Pods = append(object.Pods, *t.selector)
	}
	for _, block := range r.blocks {
		object.Blocks = append(object.Blocks, nodestate.Block{CIDR: block.CIDR, Except: block.Except})
	}
	return object
}

// Changes are what the datapath lacks, in the order in which Apply makes them. At each point, an address that a former and a
// new rule admit is admitted.
type Changes struct {
	Additions map[netip.Addr]uint32 // classes of addresses that have none
	Policies  []ebpfmaps.OwnPolicy  // of pods whose rules differ
	Others    map[netip.Addr]uint32 // classes of addresses that have another one; 0: none any more
	Revoked   map[loader.Owner]bool // pods whose rules name the class that an address has lost

	Want *Present // all of it
	// SeesDevices says that a pod may have come, gone, or got its address: its device may need another policy.
	SeesDevices bool

	lost []uint32    // classes that an address had
	had  connections // of pods that a direction of becomes isolated
}

// IsEmpty reports whether the datapath has everything.
func (c *Changes) IsEmpty() bool {
	return len(c.Additions) == 0 && len(c.Policies) == 0 && len(c.Others) == 0 && !c.SeesDevices
}

// Difference compares. Without all pods, addresses that nobody seems to have keep their classes.
func Difference(state *State, have *Present, hasAllPods bool) *Changes {
	c := &Changes{Additions: map[netip.Addr]uint32{}, Others: map[netip.Addr]uint32{}, Revoked: map[loader.Owner]bool{}, Want: wantedBy(state)}
	isEqual := map[[2]*Rules]bool{} // pods share them
	for owner, rules := range c.Want.Pods {
		pair := [2]*Rules{have.Pods[owner], rules}
		if _, isKnown := isEqual[pair]; !isKnown {
			isEqual[pair] = pair[0] != nil && pair[0].equal(rules)
		}
		if !isEqual[pair] {
			c.Policies = append(c.Policies, ebpfmaps.OwnPolicy{Owner: owner, Ingress: rules.Sets[ingress], Egress: rules.Sets[egress]})
		}
	}
	for addr, class := range state.Classes {
		c.setClass(addr, have.Classes[addr], class)
	}
	for addr, class := range have.Classes {
		if _, isKnown := state.Classes[addr]; isKnown {
			continue
		}
		if hasAllPods {
			c.setClass(addr, class, 0)
		} else {
			c.Want.Classes[addr] = class
		}
	}
	c.revoke()
	c.SeesDevices = len(c.Policies) > 0 || len(c.Want.Pods) != len(have.Pods) || !maps.Equal(c.Want.Own, have.Own) ||
		!maps.Equal(c.Want.Released, have.Released) || c.Want.IsUnused != have.IsUnused
	return c
}

// ClassDifference compares the classes of some addresses alone. It changes have, which becomes what is wanted.
func ClassDifference(classes map[netip.Addr]uint32, have *Present) *Changes {
	c := &Changes{Additions: map[netip.Addr]uint32{}, Others: map[netip.Addr]uint32{}, Revoked: map[loader.Owner]bool{}, Want: have}
	for addr, class := range classes {
		c.setClass(addr, have.Classes[addr], class)
		if have.Classes[addr] = class; class == 0 {
			delete(have.Classes, addr)
		}
	}
	c.revoke()
	return c
}

func (c *Changes) setClass(addr netip.Addr, before, class uint32) {
	switch before {
	case class:
	case 0:
		c.Additions[addr] = class
	default:
		c.Others[addr] = class
		c.lost = append(c.lost, before)
	}
}

// revoke finds the pods whose rules name a class that an address has lost.
func (c *Changes) revoke() {
	slices.Sort(c.lost)
	for _, class := range slices.Compact(c.lost) {
		for owner, rules := range c.Want.Pods {
			if !c.Revoked[owner] && rules.uses(class) {
				c.Revoked[owner] = true
			}
		}
	}
}

func wantedBy(state *State) *Present {
	want := &Present{
		Pods: map[loader.Owner]*Rules{}, Names: map[loader.Owner]string{}, Own: map[netip.Addr]loader.Owner{}, Released: map[loader.Owner]bool{},
		Classes: maps.Clone(state.Classes), Selectors: state.Selectors, IsUnused: len(state.Namespaces) == 0,
	}
	for uid, rules := range state.Pods {
		owner := ebpfmaps.PodToken(uid)
		want.Pods[owner], want.Names[owner] = rules, state.Names[uid]
	}
	for addr, uid := range state.Own {
		want.Own[addr] = ebpfmaps.PodToken(uid)
	}
	for uid := range state.Released {
		want.Released[ebpfmaps.PodToken(uid)] = true
	}
	return want
}

func (r *Rules) equal(other *Rules) bool {
	return r == other || r.Sets[ingress].Equal(other.Sets[ingress]) && r.Sets[egress].Equal(other.Sets[egress])
}

// isolates reports whether the rules isolate a direction that a policy does not.
func (r *Rules) isolates(before ebpfmaps.Policy) bool {
	return r.Sets[ingress] != nil && before.Ingress == 0 || r.Sets[egress] != nil && before.Egress == 0
}

// devicesOf returns the devices whose policy must change, with the new one, and those of pods that a direction of is about
// to be isolated. A pod that has been connected by an older plugin, without policies, is known by its address.
func devicesOf(devices []ebpfmaps.Device, policies []ebpfmaps.Policy, want *Present) (moved, isolated []ebpfmaps.Device) {
	byIndex, byOwner := map[ebpfmaps.PolicyIndex]ebpfmaps.Policy{}, map[loader.Owner]ebpfmaps.PolicyIndex{}
	for _, policy := range policies {
		byIndex[policy.Index], byOwner[policy.Owner] = policy, policy.Index
	}
	for _, device := range devices {
		before := byIndex[device.Policy]
		pod := before.Owner
		if device.IsPod {
			pod = loader.Owner(device.Container)
		} else if !before.IsPod {
			if pod = want.Own[device.Addr4]; pod == 0 {
				pod = want.Own[device.Addr6]
			}
		}
		index := device.Policy
		if rules := want.Pods[pod]; rules != nil && pod != 0 {
			if own := byOwner[pod]; own != 0 { // 0: there is no room for it
				index = own
			}
			if rules.isolates(before) {
				isolated = append(isolated, device)
			}
		} else if before.IsPod && (want.Released[pod] || want.IsUnused) {
			index = byOwner[device.Owner] // of the configuration, or 0
		}
		if index != device.Policy {
			device.Policy = index
			moved = append(moved, device)
		}
	}
	return moved, isolated
}
