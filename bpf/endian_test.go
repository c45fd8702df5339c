package bpf

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
)

// TestEndians wants the same maps, types and Go code for big-endian machines as for little-endian ones, which the tests
// run on: both are compiled from the same sources, but no test of packets sees the big-endian ones.
func TestEndians(t *testing.T) {
	for _, object := range []string{"datapath", "stackdrops"} {
		little, big := loadObject(t, object+"_bpfel.o"), loadObject(t, object+"_bpfeb.o")
		if got, want := len(big.Programs), len(little.Programs); got != want {
			t.Errorf("%s: got %d programs for big endian, want %d", object, got, want)
		}
		if got, want := len(big.Maps), len(little.Maps); got != want {
			t.Errorf("%s: got %d maps for big endian, want %d", object, got, want)
		}
		for name, want := range little.Maps {
			if got := big.Maps[name]; got == nil || layout(t, got) != layout(t, want) {
				t.Errorf("%s: map %s: got %v for big endian, want %v", object, name, got, want)
			}
		}
		if got, want := goCode(t, object+"_bpfeb.go"), goCode(t, object+"_bpfel.go"); got != want {
			t.Errorf("%s: the Go code for big endian differs", object)
		}
	}
}

func loadObject(t *testing.T, file string) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := ebpf.LoadCollectionSpec(file)
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// layout returns the sizes of a map, and where the members of its keys and values are.
func layout(t *testing.T, m *ebpf.MapSpec) string {
	t.Helper()
	return fmt.Sprint(m.Type, m.KeySize, m.ValueSize, m.MaxEntries, describe(t, m.Key), describe(t, m.Value))
}

func describe(t *testing.T, typ btf.Type) string {
	t.Helper()
	if typ == nil {
		return "none"
	}
	size, err := btf.Sizeof(typ)
	if err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(size)
	var members []btf.Member
	switch typ := btf.UnderlyingType(typ).(type) {
	case *btf.Struct:
		members = typ.Members
	case *btf.Union:
		members = typ.Members
	case *btf.Array:
		text += " of " + describe(t, typ.Type)
	}
	for _, member := range members {
		text += fmt.Sprintf(" %s at %d: %s;", member.Name, member.Offset, describe(t, member.Type))
	}
	return text
}

// goCode returns a generated file without what differs by intent: the machines that it is for, and the object's name.
func goCode(t *testing.T, file string) string {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	_, code, found := strings.Cut(string(content), "\npackage ")
	if !found {
		t.Fatalf("%s has no package", file)
	}
	return strings.ReplaceAll(code, "bpfeb", "bpfel")
}
