package loader

import (
	"iter"
	"reflect"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// mapTraits has what the generated list of maps does not say about a map, and the
// kernel says only about an open map.
type mapTraits struct {
	// inADD: every ADD writes the map. Open opens only these, because each map costs five
	// system calls.
	inADD bool
	// owned: every entry has an owner, in the same place in every version (bpf/abi.h),
	// so any version can remove it.
	owned bool
	// flowsPerEntry sizes the map: it has Options.MaxFlows divided by this number of entries. 0 keeps
	// the size in bpf/maps.h.
	flowsPerEntry uint32
	// onDemand: only OpenOnDemand opens the map. It can open all others, too.
	onDemand bool
}

// registry has all decisions about maps. A map without a row belongs to
// the programs, and user space never opens it.
var registry = map[string]mapTraits{
	bpf.MapEndpoints:     {inADD: true, owned: true},
	bpf.MapDevices:       {inADD: true, owned: true},
	bpf.MapHostPorts:     {inADD: true, owned: true},
	bpf.MapPrefixes:      {},
	bpf.MapNodes:         {},
	bpf.MapUplinks:       {inADD: true},
	bpf.MapDrops:         {owned: true},
	bpf.MapDropTotals:    {},
	bpf.MapAdmittedFlows: {owned: true},
	bpf.MapFlowBuckets:   {flowsPerEntry: flowWays},
	bpf.MapFlowTable:     {},

	bpf.MapCluster:      {onDemand: true},
	bpf.MapFwdCache:     {onDemand: true},
	bpf.MapGeneration:   {onDemand: true},
	bpf.MapPortMarks:    {onDemand: true},
	bpf.MapPolicies:     {onDemand: true},
	bpf.MapPeerClasses:  {onDemand: true},
	bpf.MapRuleSets:     {onDemand: true},
	bpf.MapPolicyRules:  {onDemand: true},
	bpf.MapPolicyBlocks: {onDemand: true},
	bpf.MapRouteRules:   {onDemand: true},
	bpf.MapStackNotes:   {onDemand: true},

	bpf.MapDropReader: {onDemand: true},
	bpf.MapDropLimits: {onDemand: true},
	bpf.MapDropEvents: {onDemand: true},
}

// flowWays is FLOW_WAYS in bpf/abi.h.
const flowWays = uint32(len(bpf.FlowBucket{}.Id))

// size returns the number of entries of a map that is sized by the number of flows.
func (t mapTraits) size(flows uint32) uint32 {
	return max((flows+t.flowsPerEntry-1)/t.flowsPerEntry, 1)
}

// mapNames are the names of the fields of bpf.Maps in bpf/maps.h.
var mapNames = func() (names []string) {
	for _, field := range reflect.VisibleFields(reflect.TypeFor[bpf.Maps]()) {
		names = append(names, field.Tag.Get("ebpf"))
	}
	return names
}()

// registered yields the maps of the registry and where they are kept.
func (d *Datapath) registered() iter.Seq2[string, **ebpf.Map] {
	return func(yield func(string, **ebpf.Map) bool) {
		all := reflect.ValueOf(&d.Maps).Elem()
		for i, name := range mapNames {
			if _, ok := registry[name]; ok && !yield(name, all.Field(i).Addr().Interface().(**ebpf.Map)) {
				return
			}
		}
	}
}
