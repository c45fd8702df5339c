package loader

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestRegistry holds the table against the embedded maps: a row names a map, a map with
// owners is marked as such, and what a program needs for one packet has no row.
func TestRegistry(t *testing.T) {
	spec, err := bpf.LoadDatapath()
	if err != nil {
		t.Fatal(err)
	}
	d := &Datapath{}
	listed := 0
	for name := range d.registered() {
		listed++
		if spec.Maps[name] == nil {
			t.Errorf("%s: no such map", name)
		}
	}
	if listed != len(registry) {
		t.Errorf("%d rows, but only %d of the generated maps", len(registry), listed)
	}
	for name, m := range spec.Maps {
		traits, ok := registry[name]
		isArray := m.Type == ebpf.Array // whose entries cannot be removed
		owned := !isScratch(m) && !isArray && (beginsWithOwner(m.Key) || beginsWithOwner(m.Value))
		if owned != traits.owned {
			t.Errorf("%s: owned is %v in the registry, %v in its types", name, traits.owned, owned)
		}
		if isScratch(m) && ok {
			t.Errorf("%s: user space has no use for it", name)
		}
		if traits.flowsPerEntry != 0 && m.Type != ebpf.LRUHash && name != bpf.MapFlowBuckets {
			t.Errorf("%s: sized by the number of flows, but its type is %s", name, m.Type)
		}
	}
}

func beginsWithOwner(t btf.Type) bool {
	s, ok := btf.As[*btf.Struct](t)
	return ok && s.Members[0].Name == "owner"
}
