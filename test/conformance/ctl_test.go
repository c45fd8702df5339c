package conformance

import (
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"

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

	exit, stdout, stderr = h.ctl(t, "status", "-o", "wide")
	if exit != 0 {
		t.Fatalf("got exit code %d, want 0: %s", exit, stderr)
	}
	for _, word := range []string{"ebpfnet      healthy\n", "containers   1\n", "endpoints", "flows", "2048", testenv.UplinkName} {
		if !strings.Contains(stdout, word) {
			t.Errorf("status: want %q in:\n%s", word, stdout)
		}
	}
}

// TestCtlStatusUnhealthy drops packets, detaches a program and removes a device: the status has the drops, and is
// not healthy.
func TestCtlStatusUnhealthy(t *testing.T) {
	h := newHost(t)
	p, gone := h.pod(t, "c1", dual("1.1.0")), h.pod(t, "c2", dual("1.1.0"))
	device := p.hostDevice(t, p.add(t)).Attrs().Name
	defer p.del(t)
	gone.add(t)
	gone.vanish(t)

	frame := make([]byte, 60) // source MAC 00:00:00:00:00:00
	if err := p.SendFrames(testenv.PodIfName, frame, frame); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Node.Run(testenv.Context(t), "tc", "qdisc", "del", "dev", device, "clsact"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "the status to count 2 drops", func() error {
		_, text, stderr := h.ctl(t, "status")
		for _, want := range []string{
			"ebpfnet      not healthy", "containers   1; 1 dead", "missing: program of ebpf", "dropped      2 by mac: source MAC address is not the container's",
		} {
			if !strings.Contains(text, want) {
				return errors.New(text + stderr)
			}
		}
		if strings.Count(text, "\n") > 15 {
			return errors.New(text)
		}
		return nil
	})
}
