package maps

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// TestFlowTimes computes times around the limits of their numbers.
func TestFlowTimes(t *testing.T) {
	dp := &loader.Datapath{}
	dp.Config.Timeout[bpf.FlowUDP] = 30
	for _, test := range []struct {
		now, lastSeen, opened uint32
		state                 bpf.FlowState
		age, idle             time.Duration
		expired               bool
	}{
		{100, 90, 40, bpf.FlowUDP, 60 * tick, 10 * tick, false},
		{100, 70, 40, bpf.FlowUDP, 60 * tick, 30 * tick, false},
		{100, 69, 40, bpf.FlowUDP, 60 * tick, 31 * tick, true},
		{100, 101, 101, bpf.FlowUDP, 0, 0, false}, // a packet came meanwhile
		{1 << 16, 1<<16 - 1, 1<<16 - 2, bpf.FlowUDP, 2 * tick, tick, false},
		{5, 1<<32 - 5, 1<<32 - 5, bpf.FlowUDP, 10 * tick, 10 * tick, false},
		{1 << 17, 1, 1, bpf.FlowUDP, (1<<17 - 1) * tick, (1<<17 - 1) * tick, true}, // older than its age can say
		{100, 100, 100, bpf.FlowStates, 0, 0, true},
	} {
		value := bpf.Flow{LastSeen: test.lastSeen, Created: uint16(test.opened), State: test.state}
		got := flowEntryOf(dp, bpf.FlowKey{}, value, test.now)
		if got.Age != test.age || got.Idle != test.idle || got.Expired != test.expired {
			t.Errorf("%+v: got age %d, idle %d ticks, expired %v", test, got.Age/tick, got.Idle/tick, got.Expired)
		}
	}
}

func TestOffloadState(t *testing.T) {
	for state, want := range map[bpf.OffloadState]string{
		1: "one way", 2: "one way", 1 | 2: "open", 1 | 4: "one way", 1 | 2 | 16: "closing", 1 | 2 | 16 | 32 | 64: "closing", 1 | 2 | 16 | 32 | 64 | 128: "closed",
	} {
		if got := offloadEntryOf(bpf.FlowKey{}, bpf.Offload{State: state}, 0).State; got != want {
			t.Errorf("state %#x: got %q, want %q", state, got, want)
		}
	}
}

// TestCacheEntry says what becomes of packets, and since when, around the limits of jiffies.
func TestCacheEntry(t *testing.T) {
	for _, test := range []struct {
		action              bpf.FwdAction
		generation, updated uint32
		state               string
		idle                time.Duration
	}{
		{bpf.FwdContainer, 7, 100, "bypass", 0},
		{bpf.FwdStack, 7, 90, "stack", 40 * time.Millisecond},
		{bpf.FwdStack, 8, 90, "void", 40 * time.Millisecond},
		{bpf.FwdContainer, 8, 101, "void", 0}, // a packet came meanwhile
		{bpf.FwdContainer, 7, 1<<32 - 10, "bypass", 440 * time.Millisecond},
		{bpf.FwdContainer, 7, 1<<31 + 101, "bypass", (1<<31 - 1) * 4 * time.Millisecond}, // weeks ago
	} {
		value := bpf.FwdEntry{Action: test.action, Generation: test.generation, Updated: test.updated}
		got := cacheEntryOf(value, 7, loader.Clock{Now: 100, Jiffy: 4 * time.Millisecond})
		if got.State != test.state || got.Idle != test.idle {
			t.Errorf("%+v: got %s, idle for %s", test, got.State, got.Idle)
		}
	}
}
