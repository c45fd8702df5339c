package conformance

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
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
	writeConf(t, conf)
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}, // TCX_NEXT
	})
	testenv.Must(t, err)
	defer program.Close()

	for _, test := range []struct {
		where, device, check string
		anchor               link.Anchor
		want                 string // "": nothing is found
	}{
		{"before ours on the uplink", testenv.UplinkName, "uplinks", link.Head(), "on uplink " + testenv.UplinkName + ", foreign (program "},
		{"behind ours on the uplink", testenv.UplinkName, "uplinks", link.Tail(), ""},
		{"on the container's device", result.Interfaces[0].Name, "programs", nil, "of pods/c1, foreign (program "},
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
		found := findings(t, stdout, test.check)
		if exit != 0 || (test.want == "") != strings.Contains(found, "good") || !strings.Contains(found, test.want) {
			t.Errorf("%s: got exit code %d, %s (%s), want a warning with %q", test.where, exit, found, stderr, test.want)
		}
		attached.Close()
	}
	exit, stdout, _ := h.ctl(t, "doctor", "--conf-dir", conf, "--bin-dir", dir, "-o", "json")
	if found := findings(t, stdout, "uplinks"); exit != 0 || !strings.Contains(found, "good") {
		t.Errorf("without them: got exit code %d, %s, want a good state", exit, found)
	}
}

// TestDoctorDatapath has programs of another layout, then of another build, and then a map that fills up. What doctor
// says to do fixes each.
func TestDoctorDatapath(t *testing.T) {
	h := newHost(t)
	conf := t.TempDir()
	load := func(programs loader.Programs) {
		t.Helper()
		err := h.Node.Do(func() error {
			d, err := loader.Open(testenv.Context(t), loader.Options{Programs: &programs})
			if err == nil {
				d.Close()
			}
			return err
		})
		if err != nil && !errors.Is(err, loader.ErrIncompatible) {
			t.Fatal(err)
		}
	}
	want := func(exit int, check, text string) {
		t.Helper()
		got, stdout, stderr := h.ctl(t, "doctor", "--conf-dir", conf, "--bin-dir", conf, "-o", "json")
		if found := findings(t, stdout, check); got != exit || !strings.Contains(found, text) {
			t.Errorf("got exit code %d, %s: %q (%s), want %d, %q", got, check, found, stderr, exit, text)
		}
	}
	writeConf(t, conf)
	want(3, "datapath", "good: not loaded yet") // 3: no plugin there
	load(otherLayout())
	want(3, "datapath", "wrong: the loaded datapath belongs to another version of ebpfnet, with another map layout: new")
	for _, check := range []string{"programs", "uplinks", "containers"} {
		want(3, check, "unknown: the check could not look: what is loaded cannot be opened")
	}
	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")

	other := loader.Embedded()
	other.Build++
	load(other)
	want(3, "datapath", "warning: the loaded programs are not those of this ebpfnetctl")
	h.wantCtl(t, 0, []string{"upgrade"}, "")
	want(3, "datapath", "good: loaded")

	const limit = 1 << 16
	var keys [limit][16]byte
	for n := range keys {
		binary.BigEndian.PutUint32(keys[n][4:], uint32(n)) // ::n:0:0
	}
	change := func(change func(*ebpf.Map) (int, error)) {
		t.Helper()
		h.withDatapath(t, func(d *loader.Datapath) error {
			_, err := change(d.Endpoints)
			return err
		})
	}
	put := func(from, to int) {
		t.Helper()
		change(func(m *ebpf.Map) (int, error) {
			return m.BatchUpdate(keys[from:to], make([]bpf.Endpoint, to-from), nil)
		})
	}
	want(3, "datapath", "good")
	put(0, 58983)
	want(3, "datapath", "warning: map endpoints has 58983 of 65536 entries")
	put(58983, limit)
	want(3, "datapath", "wrong: map endpoints has 65536 of 65536 entries")
	change(func(m *ebpf.Map) (int, error) { return m.BatchDelete(keys[:], nil) })
	want(3, "datapath", "good")
}

// writeConf writes a configuration into a runtime's directory.
func writeConf(t *testing.T, dir string) {
	t.Helper()
	text, err := json.Marshal(dual("1.1.0"))
	testenv.Must(t, err)
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "10-pods.conf"), text, 0o644))
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
