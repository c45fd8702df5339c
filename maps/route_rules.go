package maps

import (
	"fmt"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// RouteRules says for each family whether the host has policy rules that the programs
// cannot follow. Then the stack routes new connections with the outside, even with fastPath
// always.
type RouteRules struct{ IPv4, IPv6 bool }

// ReadRouteRules returns the rules in the map.
func ReadRouteRules(dp *loader.Datapath) (rules RouteRules, err error) {
	if err := dp.OpenOnDemand(bpf.MapRouteRules); err != nil || dp.RouteRules == nil {
		return rules, err
	}
	for key, flag := range rules.flags() {
		var value uint32
		if err := dp.RouteRules.Lookup(uint32(key), &value); err != nil {
			return rules, fmt.Errorf("look up policy rules: %w", err)
		}
		*flag = value != 0
	}
	return rules, nil
}

// PutRouteRules writes the rules to the map.
func (s *Store) PutRouteRules(rules RouteRules) error {
	if err := s.dp.OpenOnDemand(bpf.MapRouteRules); err != nil || s.dp.RouteRules == nil {
		return err
	}
	s.changed = true
	for key, flag := range rules.flags() {
		var value uint32
		if *flag {
			value = 1
		}
		if err := s.dp.RouteRules.Put(uint32(key), value); err != nil {
			return fmt.Errorf("put policy rules: %w", err)
		}
	}
	return nil
}

// flags returns the rules in the order of the map's keys.
func (r *RouteRules) flags() []*bool { return []*bool{&r.IPv4, &r.IPv6} }
