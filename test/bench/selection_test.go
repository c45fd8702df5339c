package main

import (
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// A part of a run sets up only what it measures.
func TestConcerns(t *testing.T) {
	for _, test := range []struct {
		args string
		want int
	}{
		{"-only plain,ebpfnet-established -paths pod-pod -workloads tcp-crr", 2},
		{"-only plain,bare-big -paths pod-outside -workloads tcp-stream", len(uplinks)}, // bare-big has no outside
		{"-paths pod-node -workloads tcp-rr", 8},                                        // a bare veth, four ways of others, and three of ours
		{"-only plain,bare,ebpfnet-always -workloads calls", 2},                         // plain has none
		{"-scale -only ebpfnet-established -paths pod-pod", 2 + len(allScales())},
	} {
		opts, err := parseOptions(strings.Fields(test.args))
		testenv.Must(t, err)
		got := slices.DeleteFunc(opts.plan().setups(), func(p plannedSetup) bool { return !opts.concerns(p) })
		if len(got) != test.want {
			t.Errorf("%s: %d setups, want %d", test.args, len(got), test.want)
		}
	}
}
