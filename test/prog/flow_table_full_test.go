package prog

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
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
		{"the pod's share with four free places", flowWays - 4, assured("pod"), none, false},
		{"more than the pod's share", flowWays - 3, assured("pod"), none, true},
		{"another pod has more than its share", flowWays - 1, assured("pod2"), none, false},
	} {
		for _, s := range (row{on: []proto{tcp}}).scenes() {
			t.Run(tc.name+" "+s.name, func(t *testing.T) {
				var flows []flow
				for i := range tc.used {
					flows = append(flows, tc.fill(i))
				}
				if err := errors.Join(h.reset(), h.fill(s, nil, flows)); err != nil {
					t.Fatal(err)
				}
				before, err := h.flows().all()
				if err != nil || len(before) != tc.used {
					t.Fatalf("flows: got %d (%v), want %d", len(before), err, tc.used)
				}
				port := h.masquerade(t, s, outgoing)
				after, err := h.flows().all()
				if err != nil {
					t.Fatal(err)
				}
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

// TestFlowTableAttack has pods fill the table with connections that their accomplice answers. Another pod loses none of
// its own, and can still open most.
func TestFlowTableAttack(t *testing.T) {
	const buckets, own, more = 64, 50, 200
	s := scene{addressing: v4, proto: tcp}
	for attackers, least := range map[int]int{1: more, 2: more, 4: more * 9 / 10} {
		t.Run(fmt.Sprint(attackers, " attackers"), func(t *testing.T) {
			h := newHost(t)
			if err := h.reset(); err != nil {
				t.Fatal(err)
			}
			var victims []flow
			for i := range own {
				victims = append(victims, snat(fmt.Sprintf("remote:%d", 1000+i), "node:2000", "pod2:5000").established().idleFor(day))
			}
			if err := h.fill(s, nil, victims); err != nil {
				t.Fatal(err)
			}
			for i := range 4 * buckets * flowWays {
				h.answered(t, s, fmt.Sprintf("pod:%d > remote:%d", 1024+i, 80+i%attackers), uint64(1000+i%attackers))
			}
			after, err := h.flows().all()
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range victims {
				key, value := f.wire(s)
				if entry, found := after[key]; !found || entry.State != value.State {
					t.Errorf("lost %+v", key)
				}
			}
			opened := 0
			for i := range more {
				if h.masquerade(t, s, fmt.Sprintf("pod2:%d > remote:443", 2000+i)) != 0 {
					opened++
				}
			}
			if opened < least {
				t.Errorf("with %d of %d places used, another pod opened %d of %d connections, want %d", len(after), buckets*flowWays, opened, more, least)
			}
			t.Logf("%d of %d places used, %d of %d opened", len(after), buckets*flowWays, opened, more)
		})
	}
}

// answered has the pod, as another owner, open a connection, which becomes assured at once.
func (h *host) answered(t *testing.T, s scene, text string, owner uint64) {
	t.Helper()
	if err := h.putOwner(s.addressing, "pod", owner); err != nil {
		t.Fatal(err)
	}
	before, err := h.flows().all()
	if err != nil {
		t.Fatal(err)
	}
	if h.masquerade(t, s, text) == 0 {
		return
	}
	after, err := h.flows().all()
	if err != nil {
		t.Fatal(err)
	}
	for key := range maps.Keys(before) {
		delete(after, key)
	}
	for key, value := range after {
		value.State, value.Flags = bpf.FlowEstablished, replied
		if err := h.flows().Put(key, value); err != nil {
			t.Fatal(err)
		}
	}
}
