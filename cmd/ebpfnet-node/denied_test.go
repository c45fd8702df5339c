package main

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
)

// TestDeniedLines prints a connection once a minute, no more lines per second than asked for, and how many packets it left out.
func TestDeniedLines(t *testing.T) {
	var out strings.Builder
	lines := newDeniedLines(&out, func(e *bpf.DropEvent) (drops.Drop, error) {
		return drops.Drop{Source: fmt.Sprint("client ", e.Len)}, nil
	}, 2)
	start := time.Unix(1_700_000_000, 0)
	for _, step := range []struct {
		after   time.Duration
		clients []uint32
		want    string
	}{
		{0, []uint32{1, 1, 2, 2, 3}, "1 2"},
		{900 * time.Millisecond, []uint32{3}, ""},
		{time.Second, []uint32{1, 3, 4, 5}, "3 4"},
		{time.Minute, []uint32{1, 1, 3}, "1"},
	} {
		out.Reset()
		lines.now = start.Add(step.after)
		for _, client := range step.clients {
			lines.add(&bpf.DropEvent{Len: client, Reason: uint32(bpf.ReasonPolicyIngress)})
		}
		var got []string
		for line := range strings.Lines(out.String()) {
			_, rest, _ := strings.Cut(line, `"source":"client `)
			client, _, _ := strings.Cut(rest, `"`)
			got = append(got, client)
		}
		if strings.Join(got, " ") != step.want || lines.err != nil {
			t.Errorf("after %v: got %v (%v), want %s: %s", step.after, got, lines.err, step.want, out.String())
		}
	}
	out.Reset()
	lines.addLeftOut(map[uint32]uint64{uint32(bpf.ReasonPolicyEgress): 5})
	lines.addLeftOut(nil) // nothing since
	const want = `"leftOut":9,"byReason":{"policy-egress":5,"policy-ingress":4}}`
	if got := out.String(); !strings.HasSuffix(got, want+"\n") || strings.Count(got, "\n") != 1 {
		t.Errorf("left out: got %s, want %s", got, want)
	}
}
