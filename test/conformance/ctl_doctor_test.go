package conformance

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestDoctorForeignPrograms has a program of another tool before ours on an uplink and on a container's device, and
// then behind it. Scripts make the other faults.
func TestDoctorForeignPrograms(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	result := p.add(t)
	dir := filepath.Dir(h.plugin)
	conf := t.TempDir()
	text, err := json.Marshal(dual("1.1.0"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(conf, "10-pods.conf"), text, 0o644); err != nil {
		t.Fatal(err)
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}, // TCX_NEXT
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()

	for _, test := range []struct {
		where, device string
		anchor        link.Anchor
		want          string // "": nothing is found
	}{
		{"before ours on the uplink", testenv.UplinkName, link.Head(), "on uplink " + testenv.UplinkName + ", foreign (program "},
		{"behind ours on the uplink", testenv.UplinkName, link.Tail(), ""},
		{"on the container's device", result.Interfaces[0].Name, nil, "of pods/c1, foreign (program "},
	} {
		var attached link.Link
		err := h.Node.Do(func() error {
			device, err := net.InterfaceByName(test.device)
			if err != nil {
				return err
			}
			attached, err = link.AttachTCX(link.TCXOptions{Interface: device.Index, Program: program, Attach: ebpf.AttachTCXIngress, Anchor: test.anchor})
			return err
		})
		if err != nil {
			t.Fatalf("attach %s: %v", test.where, err)
		}
		exit, stdout, stderr := h.ctl(t, "doctor", "--conf-dir", conf, "--bin-dir", dir, "-o", "json")
		found := findings(t, stdout, "foreign-programs")
		if exit != 0 || (test.want == "") != strings.Contains(found, "good") || !strings.Contains(found, test.want) {
			t.Errorf("%s: got exit code %d, %s (%s), want a warning with %q", test.where, exit, found, stderr, test.want)
		}
		attached.Close()
	}
	exit, stdout, _ := h.ctl(t, "doctor", "--conf-dir", conf, "--bin-dir", dir, "-o", "json")
	if found := findings(t, stdout, "foreign-programs"); exit != 0 || !strings.Contains(found, "good") {
		t.Errorf("without them: got exit code %d, %s, want a good state", exit, found)
	}
}

// findings returns the states and texts of one check in what `doctor -o json` prints.
func findings(t *testing.T, stdout, check string) string {
	t.Helper()
	var all []struct{ Check, State, What string }
	if err := json.Unmarshal([]byte(stdout), &all); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	var found []string
	for _, f := range all {
		if f.Check == check {
			found = append(found, f.State+": "+f.What)
		}
	}
	return strings.Join(found, "\n")
}
