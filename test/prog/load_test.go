package prog

import (
	"errors"
	"flag"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var update = flag.Bool("update", false, "rewrite the running kernel's lines of "+verifiedFile)

// TestLoad loads every program, and compares its verifier costs with verified.txt.
func TestLoad(t *testing.T) {
	spec, err := newSpec()
	testenv.Must(t, err)
	testenv.Must(t, rlimit.RemoveMemlock())
	loaded, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		Programs: ebpf.ProgramOptions{LogLevel: ebpf.LogLevelStats},
	})
	if err != nil {
		var verifier *ebpf.VerifierError
		if errors.As(err, &verifier) {
			t.Logf("%+v", verifier)
		}
		t.Fatalf("load: %v", err)
	}
	defer loaded.Close()

	costs := make(map[string]cost)
	for name := range spec.Programs {
		program := loaded.Programs[name]
		if program == nil {
			t.Errorf("no program %s", name)
			continue
		}
		costs[name], err = parseCost(program.VerifierLog, spec.Programs[name].Instructions)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		t.Logf("program %-14s %7d instructions verified, %3d bytes of stack", name, costs[name].insns, costs[name].stack)
	}
	if len(loaded.Programs) != len(programs)+1 { // stack_hooks takes no packets
		t.Errorf("%d programs loaded, this package tests %d", len(loaded.Programs), len(programs))
	}
	wantNoWarning(t)
	if !t.Failed() {
		compareVerified(t, costs)
	}
}

// wantNoWarning wants the verifier not to have met an error of its own: the kernel's log warns of the first one.
func wantNoWarning(t *testing.T) {
	t.Helper()
	log := make([]byte, 1<<20)
	length, err := unix.Klogctl(unix.SYSLOG_ACTION_READ_ALL, log)
	testenv.Must(t, err)
	for line := range strings.Lines(string(log[:length])) {
		if strings.Contains(line, "verifier bug") || strings.Contains(line, "REG INVARIANTS VIOLATION") {
			t.Errorf("the kernel warns: %s", line)
		}
	}
}

func compareVerified(t *testing.T, costs map[string]cost) {
	t.Helper()
	version, err := testenv.KernelVersion()
	testenv.Must(t, err)
	series := version.String()
	if *update {
		testenv.NoError(t, renew(series, costs))
		return
	}
	all, err := parseVerified(verifiedText)
	testenv.Must(t, err)
	committed := all[series]
	if committed == nil {
		t.Logf("nothing to compare: %s has no kernel %s; %s", verifiedFile, series, renewVerified)
		return
	}
	if err := checkGrowth(committed, costs); err != nil {
		t.Errorf("kernel %s: %v\nif intended: %s", series, err, renewVerified)
	}
}

// TestSpec checks the configuration that the loader chooses for this machine.
func TestSpec(t *testing.T) {
	spec, err := loader.Spec(loader.Options{})
	testenv.Must(t, err)
	var got bpf.HostConfig
	testenv.Must(t, spec.Variables[bpf.VarConfig].Get(&got))
	ports := 0
	for _, r := range got.MasqPorts {
		ports += int(r.Count)
		if r.Count > 0 && (r.First < 1024 || int(r.First)+int(r.Count) > 1<<16) {
			t.Errorf("masquerading ports are %+v", r)
		}
	}
	if got.Abi != loader.ABI || got.Attach == 0 || ports < 4096 || got.Secret == [2]uint64{} {
		t.Errorf("configuration is %+v", got)
	}
	t.Logf("kernel %s: attaches by %s, finds source addresses by %s", testenv.KernelRelease(), attachWord(got.Attach), sourceWord())
}

func attachWord(attach uint32) string {
	if bpf.Attach(attach) == bpf.AttachTCX {
		return "tcx"
	}
	return "clsact"
}

func sourceWord() string {
	if testenv.FIBSource.Probe() == nil {
		return "route"
	}
	return "uplink entry"
}
