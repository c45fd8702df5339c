package prog

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// TestLoad loads every program, and logs what the verifier had to walk through.
func TestLoad(t *testing.T) {
	spec, err := newSpec()
	if err != nil {
		t.Fatal(err)
	}
	if err := rlimit.RemoveMemlock(); err != nil {
		t.Fatal(err)
	}
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		t.Fatalf("load: %+v", err)
	}
	defer loaded.Close()

	for _, name := range programs {
		program := loaded.Programs[name]
		if program == nil {
			t.Errorf("there is no program %s", name)
			continue
		}
		// "processed 2345 insns (limit 1000000) ...", in kernels of all ages.
		_, processed, _ := strings.Cut(program.VerifierLog, "processed ")
		t.Logf("%-14s %s", name, strings.TrimSpace(processed))
	}
	if len(loaded.Programs) != len(programs) {
		t.Errorf("there are %d programs, this package tests %d", len(loaded.Programs), len(programs))
	}
}

// TestSpec wants the loader to find settings for the machine that it runs on.
func TestSpec(t *testing.T) {
	spec, err := loader.Spec(loader.Options{})
	if err != nil {
		t.Fatal(err)
	}
	var got bpf.DatapathHostConfig
	if err := spec.Variables[bpf.DatapathVarConfig].Get(&got); err != nil {
		t.Fatal(err)
	}
	last := int(got.MasqPortFirst) + int(got.MasqPortCount) - 1
	if got.Abi != loader.ABI || got.Attach == 0 || got.MasqPortFirst < 1024 || got.MasqPortCount < 4096 || last > 65535 {
		t.Errorf("configuration is %+v", got)
	}
}
