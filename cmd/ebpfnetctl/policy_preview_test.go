package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ebpfnet/ebpfnet/maps"
)

// TestEachDrop reads drops that differ in one field each, one of them twice, and a line of the agent's log.
func TestEachDrop(t *testing.T) {
	const line = `{"protocol": %q, "source": "10.84.0.2:40000", "destination": "10.84.0.3:53", "ruleSet": %q}` + "\n"
	text := "time=now level=INFO\n"
	for _, d := range [][2]string{{"tcp", "egress"}, {"udp", "egress"}, {"tcp", "ingress"}, {"tcp", "ingress"}, {"icmp", "ingress"}, {"tcp", ""}} {
		text += fmt.Sprintf(line, d[0], d[1])
	}
	file := filepath.Join(t.TempDir(), "drops.json")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var got []string
	err := (&previewOptions{drops: file}).eachDrop(func(protocol maps.Protocol, pod, peer netip.AddrPort, isEgress, isDrop bool) {
		got = append(got, fmt.Sprintf("%s of %s with %s, egress %v, drop %v", protocol, pod, peer, isEgress, isDrop))
	})
	want := []string{
		"tcp of 10.84.0.2:40000 with 10.84.0.3:53, egress true, drop true",
		"udp of 10.84.0.2:40000 with 10.84.0.3:53, egress true, drop true",
		"tcp of 10.84.0.3:53 with 10.84.0.2:40000, egress false, drop true",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("got %q (%v), want %q", got, err, want)
	}
}
