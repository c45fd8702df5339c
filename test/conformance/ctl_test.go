package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ctl runs ebpfnetctl on the node.
func (h *host) ctl(t *testing.T, args ...string) (exit int, stdout, stderr string) {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), args...)
	var out, errs strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := h.Node.Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // the exit code is returned
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func TestCtlArguments(t *testing.T) {
	h := newHost(t)
	for _, test := range []struct {
		args           []string
		exit           int
		stdout, stderr string // parts of the output
	}{
		{nil, 0, "  status ", ""},
		{[]string{"--help"}, 0, "  status ", ""},
		{[]string{"help"}, 0, "  status ", ""},
		{[]string{"stauts"}, 2, "", "stauts"},
		{[]string{"status", "-o", "xml"}, 2, "", "xml"},
		{[]string{"status", "--verbose"}, 2, "", "verbose"},
		{[]string{"status", "all"}, 2, "", "all"},
		{[]string{"status", "--yes"}, 2, "", "-yes"},
		{[]string{"status", "--data-dir", "/d"}, 2, "", "-data-dir"},
		{[]string{"load", "-o", "json"}, 2, "", "-o"},
		{[]string{"set", "-o", "json", "pods", "antiSpoof=true"}, 2, "", "-o"},
		{[]string{"unload", "-o", "json"}, 2, "", "-o"},
		{[]string{"unload", "--help"}, 0, "ebpfnetctl unload --yes", ""},
		{[]string{"version"}, 0, fmt.Sprintf("devel, revision %d, build %016x, ABI %d\n", bpf.Revision, bpf.Build(), loader.ABI), ""},
		{[]string{"version", "-o", "json"}, 0, fmt.Sprintf(`"revision": %d`, bpf.Revision), ""},
		{[]string{"version", "-o", "json"}, 0, fmt.Sprintf(`"build": "%016x"`, bpf.Build()), ""},
		{[]string{"version", "-o", "yaml"}, 0, fmt.Sprintf("\nabi: %d\n", loader.ABI), ""},
		{[]string{"set", "pods"}, 2, "", "KEY=VALUE"},
		{[]string{"set", "pods", "colour=red"}, 2, "", `colour "red"`},
		{[]string{"set", "pods", "ingressPolicy=closed"}, 2, "", "same-network"},
		{[]string{"set", "pods", "antiSpoof=maybe"}, 2, "", "true or false"},
		{[]string{"set", "pods", "antiSpoof=true"}, 1, "", "not loaded"},
		{[]string{"status"}, 1, "", "not loaded"},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			exit, stdout, stderr := h.ctl(t, test.args...)
			if exit != test.exit || !strings.Contains(stdout, test.stdout) || !strings.Contains(stderr, test.stderr) {
				t.Errorf("got exit code %d, stdout %q, stderr %q; want %d, %q, %q", exit, stdout, stderr, test.exit, test.stdout, test.stderr)
			}
			if test.exit != 0 && stdout != "" {
				t.Errorf("stdout of a failure: got %q, want nothing", stdout)
			}
		})
	}
}

// TestCtlStatus compares the status with the node.
func TestCtlStatus(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", withPort(with(dual("1.1.0"), "maxFlows", 2048), 8080))
	p.add(t)
	defer p.del(t)

	exit, stdout, stderr := h.ctl(t, "status", "-o", "json")
	if exit != 0 {
		t.Fatalf("got exit code %d, want 0: %s", exit, stderr)
	}
	var status struct {
		Uplinks []string `json:"uplinks"`
		Maps    []struct {
			Name       string `json:"name"`
			Entries    int    `json:"entries"`
			MaxEntries int    `json:"maxEntries"`
			Bytes      int64  `json:"bytes"`
		} `json:"maps"`
		Bytes int64 `json:"bytes"`
		Drops []struct {
			Reason string `json:"reason"`
		} `json:"drops"`
		Features []struct {
			Name   string `json:"name"`
			Chosen string `json:"chosen"`
			Why    string `json:"why"`
		} `json:"features"`
	}
	if err := json.Unmarshal([]byte(stdout), &status); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	var sum int64
	entries, most := map[string]int{}, map[string]int{}
	for _, m := range status.Maps {
		sum += m.Bytes
		entries[m.Name], most[m.Name] = m.Entries, m.MaxEntries
		if m.Bytes == 0 && m.Entries > 0 {
			t.Errorf("map %s: got 0 bytes, want more for %d entries", m.Name, m.Entries)
		}
	}
	if sum != status.Bytes || entries["endpoints"] != 2 || entries["uplinks"] != 1 || entries["host_ports"] == 0 || most["flows"] != 2048 {
		t.Errorf("maps: got %s, want 2 endpoints, 1 uplink, host ports, room for 2048 flows, and the sum of bytes", stdout)
	}
	if len(status.Uplinks) != 1 || status.Uplinks[0] != testenv.UplinkName || len(status.Drops) == 0 {
		t.Errorf("status: got %s, want uplink %s and drops", stdout, testenv.UplinkName)
	}

	chosen := map[string]string{}
	for _, f := range status.Features {
		chosen[f.Name] = f.Chosen
		if f.Why == "" {
			t.Errorf("feature %s: got %s without a reason", f.Name, f.Chosen)
		}
	}
	has := func(f testenv.Feature, yes, no string) string {
		if f.Probe() == nil {
			return yes
		}
		return no
	}
	for name, want := range map[string]string{
		"programs on uplinks and lo": has(testenv.TCX, "tcx links", "clsact filters"),
		"BIG TCP, IPv6":              "no", // the uplink takes 64 KiB
		"BIG TCP, IPv4":              "no",
		"device auto":                has(testenv.Netkit, "netkit", "veth"),
	} {
		if chosen[name] != want {
			t.Errorf("feature %s: got %q, want %q", name, chosen[name], want)
		}
	}

	exit, stdout, stderr = h.ctl(t, "status")
	if exit != 0 {
		t.Fatalf("got exit code %d, want 0: %s", exit, stderr)
	}
	for _, word := range []string{"endpoints", "flows", "2048", testenv.UplinkName, status.Drops[0].Reason} {
		if !strings.Contains(stdout, word) {
			t.Errorf("status: want %q in:\n%s", word, stdout)
		}
	}
}

// TestCtlStatusDrops finds the packets dropped for a container under its device.
func TestCtlStatusDrops(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	defer p.del(t)

	frame := make([]byte, 60) // source MAC 00:00:00:00:00:00
	if err := p.SendFrames(testenv.PodIfName, frame, frame); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "the status to count 2 drops", func() error {
		_, stdout, stderr := h.ctl(t, "status")
		_, drops, _ := strings.Cut(stdout, "of the container behind ebpf")
		if !strings.Contains(drops, "   2  mac          source MAC address is not the container's") {
			return errors.New(stdout + stderr)
		}
		return nil
	})
}
