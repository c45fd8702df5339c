package prog

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// newHostWithOneBucket returns a host whose flow_table has a single bucket, so that all flows compete for its places.
func newHostWithOneBucket(t *testing.T) *host {
	t.Helper()
	h := newHost(t)
	h.programs = loadOfSize(t, 1)
	return h
}

// TestFlowTableFull opens a connection while its bucket is full, or almost. An assured flow is never replaced.
func TestFlowTableFull(t *testing.T) {
	h := newHostWithOneBucket(t)
	const none = -1
	of := func(pod string, i int) flow { return snat(fmt.Sprintf("remote:%d", 100+i), "node:2000", pod+":5000") }
	assured := func(pod string) func(i int) flow {
		return func(i int) flow { return of(pod, i).established().idleFor(day) }
	}
	except := func(other func(i int) flow, at int, f func(i int) flow) func(i int) flow {
		return func(i int) flow {
			if i == at {
				return f(i)
			}
			return other(i)
		}
	}
	opened := func(pod string, idle time.Duration) func(i int) flow {
		return func(i int) flow { return of(pod, i).idleFor(idle) }
	}
	for _, tc := range []struct {
		name     string
		used     int
		fill     func(i int) flow
		replaced int // none: the connection gets a free place, or is refused
		refused  bool
	}{
		{"a free place", flowWays - 1, assured("pod2"), none, false},
		{"assured flows of another pod", flowWays, assured("pod2"), none, true},
		{"assured flows of the pod", flowWays, assured("pod"), none, true},
		{"an expired flow", flowWays, except(assured("pod2"), 3, opened("pod2", 3*time.Minute)), 3, false},
		{"an expired assured flow", flowWays, except(assured("pod2"), 5, func(i int) flow { return of("pod2", i).established().idleFor(6 * day) }), 5, false},
		{"a former pod's flow", flowWays, except(assured("pod2"), 15, func(i int) flow { return of("pod2", i).established().ownedBy(formerOwner) }), 15, false},
		{"another pod's connection without an answer", flowWays, except(assured("pod2"), 0, opened("pod2", time.Second)), 0, false},
		{
			"the pod's own before another's", flowWays,
			except(except(assured("pod2"), 4, opened("pod2", time.Minute)), 7, opened("pod", time.Second)), 7, false,
		},
		{
			"what has been idle longest", flowWays,
			except(except(assured("pod2"), 4, opened("pod2", 20*time.Second)), 7, opened("pod2", time.Minute)), 7, false,
		},
		{
			"no other's, with half of the bucket", flowWays,
			func(i int) flow {
				if i < flowWays/2 {
					return assured("pod")(i)
				}
				return opened("pod2", time.Minute)(i)
			}, none, true,
		},
		{"the pod's share", flowWays - 5, assured("pod"), none, false},
		{"more than the pod's share", flowWays - 4, assured("pod"), none, true},
		{"more than the pod's share, with an expired flow", flowWays - 3, except(assured("pod"), 3, opened("pod2", 3*time.Minute)), none, true},
		{
			"the pod's own before an expired one beyond its share", flowWays,
			except(except(assured("pod"), 3, opened("pod2", 3*time.Minute)), 7, opened("pod", time.Second)), 7, false,
		},
		{
			"the last two places, with another flow of the pod", flowWays - 2,
			except(assured("pod2"), 0, assured("pod")), none, true,
		},
		{"the last two places, with none", flowWays - 2, assured("pod2"), none, false},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(tc.name+" "+s.name, func(t *testing.T) {
				var flows []flow
				for i := range tc.used {
					flows = append(flows, tc.fill(i))
				}
				testenv.Must(t, errors.Join(h.reset(), h.fill(s, nil, flows)))
				before, err := h.flows().all()
				if err != nil || len(before) != tc.used {
					t.Fatalf("flows: got %d (%v), want %d", len(before), err, tc.used)
				}
				port := h.masquerade(t, s, outgoing)
				after, err := h.flows().all()
				testenv.Must(t, err)
				if (port == 0) != tc.refused {
					t.Errorf("refused: got %v, want %v", port == 0, tc.refused)
				}
				var replaced []int
				for i, f := range flows {
					if key, _ := f.wire(s); after[key] != before[key] {
						replaced = append(replaced, i)
					}
				}
				if tc.replaced == none && len(replaced) > 0 || tc.replaced != none && !slices.Equal(replaced, []int{tc.replaced}) {
					t.Errorf("replaced: got %v, want %d", replaced, tc.replaced)
				}
			})
		}
	}
}

// TestFlowTableFullForHostPort has a client connect to a host port while the bucket has assured flows alone.
func TestFlowTableFullForHostPort(t *testing.T) {
	h := newHostWithOneBucket(t)
	for _, s := range (row{on: []proto{tcp}}).scenes() {
		var flows []flow
		for i := range flowWays {
			flows = append(flows, snat(fmt.Sprintf("remote:%d", 100+i), "node:2000", "pod2:5000").established())
		}
		err := h.check(bpf.ProgFromUplink, s, row{
			ports: []hostPort{{host: "any:8080", to: "pod:80"}}, flows: flows, in: "remote:5000 > node:8080", drop: "no port",
		})
		if err != nil {
			t.Errorf("%s: %v", s.name, err)
		}
	}
}

// TestFlowTableFullForOffload has the stack deliver a connection whose bucket is full: it stays with the stack, which is
// counted for its client, and ends no other.
func TestFlowTableFullForOffload(t *testing.T) {
	testenv.Require(t, ingressDevice)
	h := withCacheHost(t, newHostWithOneBucket(t))
	for _, tc := range []struct {
		used, assured int
		verdict       uint32
	}{
		{flowWays - 4, flowWays - 4, verdictRedirect},
		{flowWays - 3, flowWays - 3, verdictNext},
		{flowWays - 2, flowWays - 3, verdictNext},
	} {
		t.Run(fmt.Sprintf("%d places used, %d assured", tc.used, tc.assured), func(t *testing.T) {
			h.eachScene(t, withPorts, func(s scene) error {
				var flows []flow
				for i := range tc.used {
					f := snat(fmt.Sprintf("remote:%d", 100+i), "node:2000", "pod2:5000")
					if i < tc.assured {
						f = f.established().streaming()
					}
					flows = append(flows, f)
				}
				drops := h.programs.Maps[bpf.MapDrops]
				err := errors.Join(h.start(s, bpf.FastPathEstablished), h.fill(s, nil, flows), empty[bpf.DropKey, bpf.DropCount](drops))
				var stayed uint64
				for range 2 * offloadAt {
					sent, errForth := h.deliver(s, "pod", "pod2", forth)
					replied, errBack := h.deliver(s, "pod2", "pod", back)
					for _, got := range []outcome{sent, replied} {
						if tc.verdict == verdictNext && got.observed() {
							stayed++
						}
					}
					err = errors.Join(err, errForth, errBack)
				}
				all, errDrops := contents[bpf.DropKey, bpf.DropCount](drops)
				total, errTotal := h.dropped(bpf.ReasonNoOffload)
				count := all[bpf.DropKey{Owner: owners["pod"], Reason: bpf.ReasonNoOffload}]
				if count != total || count.Packets != stayed || stayed > 0 != (tc.verdict == verdictNext) {
					err = errors.Join(err, fmt.Errorf("counted: got %+v and in total %+v, want %d packets", count, total, stayed))
				}
				return errors.Join(err, errDrops, errTotal, h.bothWays(s, tc.verdict), h.checkFlows(s, flows))
			})
		})
	}
}

// TestFlowTableUse counts the places whose flows no other may replace.
func TestFlowTableUse(t *testing.T) {
	const filled = 3

	h := newHostWithOneBucket(t)
	spec, err := specOfSize(1)
	testenv.Must(t, err)
	programs := h.programs.Maps
	datapath := &loader.Datapath{}
	datapath.FlowBuckets, datapath.FlowTable = programs[bpf.MapFlowBuckets], programs[bpf.MapFlowTable]
	datapath.Devices, datapath.Endpoints = programs[bpf.MapDevices], programs[bpf.MapEndpoints]
	testenv.Must(t, spec.Variables[bpf.VarConfig].Get(&datapath.Config))
	same := func(f flow) flow { return f }
	for _, tc := range []struct {
		name   string
		on     []proto
		change func(flow) flow
		counts bool
	}{
		{"established", []proto{tcp}, func(f flow) flow { return f.established().idleFor(day) }, true},
		{"half-closed", []proto{tcp}, func(f flow) flow { return f.in(bpf.FlowCloseWait) }, true},
		{"the host's", []proto{tcp}, func(f flow) flow { return f.established().ownedBy(0) }, true},
		{"opened", []proto{tcp}, same, false},
		{"ended", []proto{tcp}, func(f flow) flow { return f.in(bpf.FlowTimeWait) }, false},
		{"expired", []proto{tcp}, func(f flow) flow { return f.established().idleFor(6 * day) }, false},
		{"a former pod's", []proto{tcp}, func(f flow) flow { return f.established().ownedBy(formerOwner) }, false},
		{"a stream", []proto{udp}, flow.streaming, true},
		{"a question", []proto{udp}, same, false},
	} {
		eachScene(t, tc.on, func(t *testing.T, s scene) {
			var flows []flow
			for i := range filled {
				flows = append(flows, tc.change(snat(fmt.Sprintf("remote:%d", 100+i), "node:2000", "pod:5000")))
			}
			testenv.Must(t, errors.Join(h.reset(), h.fill(s, nil, flows)))
			want := float64(filled) / float64(flowWays)
			if !tc.counts {
				want = 0
			}
			if got, err := ebpfmaps.FlowTableUse(datapath); err != nil || got != want {
				t.Errorf("%s: got %v (%v), want %v", tc.name, got, err, want)
			}
			testenv.Must(t, h.flows().clear())
			if got, err := ebpfmaps.FlowTableUse(datapath); err != nil || got != 0 {
				t.Errorf("%s, removed: got %v (%v), want 0", tc.name, got, err)
			}
		})
	}
}

// TestFlowTableTorn replaces flows on one CPU while another looks them up: each packet is translated to what the writer
// has seen on its port, and not by parts of two flows.
func TestFlowTableTorn(t *testing.T) {
	testenv.Require(t, twoCPUs)
	h := newHostWithOneBucket(t)
	type translation struct{ masqueraded, client uint16 }
	for _, s := range (row{on: []proto{udp}}).scenes() {
		testenv.Must(t, h.reset())
		const rounds = 30_000
		written, read := map[translation]bool{}, map[translation]bool{}
		replies := map[uint16][]byte{} // by the masqueraded port
		done := make(chan error, 1)
		go func() {
			done <- h.on(1, func() error {
				for i := range rounds {
					client := uint16(2000 + i%600)
					_, frame, err := h.run(bpf.ProgToUplink, s.packet(fmt.Sprintf("pod:%d > remote:80", client), false).MustBuild())
					if err != nil {
						return err
					}
					if p, err := testenv.Decode(frame); err == nil {
						written[translation{p.SrcPort, client}] = true
					}
				}
				return nil
			})
		}()
		errRead := h.on(0, func() error {
			for last := false; !last; { // once more when all are written
				last = len(done) > 0
				all, err := h.flows().all()
				if err != nil {
					return err
				}
				for range 2 { // the writer soon replaces what has been listed
					for key := range all {
						frame := replies[key.LocalPort]
						if frame == nil {
							p := s.packet(fmt.Sprintf("remote:80 > node:%d", key.LocalPort), true)
							copy(p.DstMAC[:], h.uplink.HardwareAddr)
							frame = p.MustBuild()
							replies[key.LocalPort] = frame
						}
						_, after, err := h.run(bpf.ProgFromUplink, frame)
						if err != nil {
							return err
						}
						if p, err := testenv.Decode(after); err == nil && p.Dst == s.addr("pod") {
							read[translation{key.LocalPort, p.DstPort}] = true
						}
					}
				}
			}
			return nil
		})
		testenv.Must(t, errors.Join(<-done, errRead))
		torn := 0
		for pair := range read {
			if !written[pair] {
				torn++
			}
		}
		if torn > 0 || len(read) < 20 {
			t.Errorf("%s: %d of %d translations are of no flow; want none, of more than 20", s.name, torn, len(read))
		}
	}
}

// TestFlowTableKeyOnce opens the same flows on two CPUs at the same time: none gets two places, although the programs look for the
// key, and choose a place, before they lock the bucket.
func TestFlowTableKeyOnce(t *testing.T) {
	testenv.Require(t, twoCPUs)
	h := newHostWithOneBucket(t)
	for _, s := range (row{on: []proto{udp}}).scenes() {
		testenv.Must(t, h.reset())
		const rounds = 1000 // a few are enough without the comparison under the lock
		var begun [2]atomic.Int32
		open := func(cpu int) error {
			defer begun[cpu].Store(rounds) // also after an error
			for i := range int32(rounds) {
				frame := s.packet(fmt.Sprintf("pod:%d > remote:80", 2000+i), false).MustBuild()
				begun[cpu].Store(i + 1)
				for begun[1-cpu].Load() <= i {
				}
				_, _, err := h.run(bpf.ProgToUplink, frame)
				if err := errors.Join(err, h.flows().checkOnce(0)); err != nil {
					return fmt.Errorf("flow %d: %w", i, err)
				}
			}
			return nil
		}
		done := make(chan error, 1)
		go func() { done <- h.on(1, func() error { return open(1) }) }()
		err := h.on(0, func() error { return open(0) })
		if err := errors.Join(err, <-done); err != nil {
			t.Errorf("%s: %v", s.name, err)
		}
	}
}

// checkOnce wants no id to have two places of the bucket.
func (f flowTable) checkOnce(index uint32) error {
	var bucket bpf.FlowBucket
	err := f.buckets.Lookup(index, &bucket)
	seen := map[uint32]bool{}
	for _, id := range bucket.Id {
		if id != 0 && seen[id] {
			return fmt.Errorf("two of the places %#x have one id", bucket.Id)
		}
		seen[id] = true
	}
	return err
}
