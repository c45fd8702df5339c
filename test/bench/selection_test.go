package main

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestOptions(t *testing.T) {
	opts, err := parseOptions(strings.Fields("-quick -json a -only bare,plain -paths pod-pod -workloads tcp-crr,calls -families IPv6 -rounds 3 -slice 20ms"))
	want := options{
		quick: true, json: "a", rounds: 3, slice: 20 * time.Millisecond,
		selection: selection{[]string{bareName, plainName}, []string{"pod-pod"}, []string{"tcp-crr", callsName}, []string{"IPv6"}},
	}
	if err != nil || !reflect.DeepEqual(opts, want) {
		t.Errorf("%+v, %v", opts, err)
	}
	if p := opts.plan(); p.rounds != 3 || p.slice != 20*time.Millisecond || p.name != quick.name {
		t.Errorf("plan %+v", p)
	}
	if cells := opts.cells(); len(cells) != 1 || cells[0].workload.name != "tcp-crr" || cells[0].family.Name != "IPv6" {
		t.Errorf("cells %+v", cells)
	}
}

// A part of a run sets up only what it measures.
func TestConcerns(t *testing.T) {
	for _, test := range []struct {
		args string
		want int
	}{
		{"-only plain,ebpfnet-established -paths pod-pod -workloads tcp-crr", 2},
		{"-only plain,bare-big -paths pod-outside -workloads tcp-stream", len(uplinks)}, // bare-big has no outside
		{"-paths pod-node -workloads tcp-rr", 1 + len(betweenNodes) + 2},
		{"-only plain,bare,ebpfnet-always -workloads calls", 2}, // plain has none
		{"-scale -only ebpfnet-established -paths pod-pod", 2 + len(allScales())},
	} {
		opts, err := parseOptions(strings.Fields(test.args))
		if err != nil {
			t.Fatal(err)
		}
		got := slices.DeleteFunc(opts.plan().setups(), func(p plannedSetup) bool { return !opts.concerns(p) })
		if len(got) != test.want {
			t.Errorf("%s: %d setups, want %d", test.args, len(got), test.want)
		}
	}
}

func TestWrongOptions(t *testing.T) {
	for args, want := range map[string]string{
		"extra":                 `unexpected argument "extra"`,
		"-unknown":              "-unknown",
		"-only bare,bear":       `-only "bear": expected some of bare,bare-big,redirect,`,
		"-paths pod":            `-paths "pod": expected some of pod-pod,pod-outside,outside-port,pod-node`,
		"-workloads tcp":        `-workloads "tcp": expected some of udp-packets,`,
		"-families ipv4":        `-families "ipv4": expected some of IPv4,IPv6`,
		"-workloads tcp-rr,":    `-workloads "": expected`,
		"-rounds -1":            "-rounds -1: expected 1 or more",
		"-slice 1ms":            "-slice 1ms: expected 5ms or more",
		"-quick -results f":     "-results needs the whole benchmark",
		"-rounds 1 -results f":  "-results needs the whole benchmark",
		"-only bare -results f": "-results needs the whole benchmark",
	} {
		if _, err := parseOptions(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", args, err, want)
		}
	}
}
