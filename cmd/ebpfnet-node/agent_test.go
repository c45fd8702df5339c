package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/health"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// fake is an API server's nodes, a host that applies all changes, and a conflist. Only the test's bubble uses it.
type fake struct {
	*agent
	changed chan time.Time
	events  chan struct{}

	list    []desired.Node
	synced  bool
	err     error
	looks   int
	present reconcile.Present
	refuse  error
	refused []nodestate.Skipped // by the kernel
	written int                 // conflists
	moved   int                 // connections made anew
	address string
	output  bytes.Buffer

	unassigned []rtnl.NodeRoute // of the host, beside those of present
}

func (f *fake) Changed() <-chan time.Time    { return f.changed }
func (f *fake) List() ([]desired.Node, bool) { return f.list, f.synced }
func (f *fake) Err() error                   { return f.err }
func (f *fake) Reconnect()                   { f.moved++ }

func (f *fake) Look() (desired.Host, *reconcile.Present, error) {
	f.looks++
	present := f.present
	present.Routes = slices.Concat(present.Routes, f.unassigned)
	return desired.Host{Links: []desired.Link{{Index: 2, MTU: 1500,
		Addresses: []netip.Prefix{netip.MustParsePrefix(f.address)}}}}, &present, nil
}

func (f *fake) Apply(_ *reconcile.Changes, want *desired.State, _ *reconcile.Present) ([]nodestate.Skipped, error) {
	if f.refuse != nil {
		wake(f.events) // by what it has changed before
		return nil, f.refuse
	}
	d := want.Device
	tunnel := d.Tunnel
	tunnel.IfIndex = 9
	f.present = reconcile.Present{
		Device: &reconcile.Device{Index: 9, Name: d.Name, Ours: true, External: true, Up: true, NoARP: true,
			Port: int(tunnel.Port), MAC: d.MAC, MTU: d.MTU, Addresses: d.Addresses},
		Tunnel: tunnel, Nodes: want.Nodes,
	}
	f.unassigned = nil
	for _, prefix := range want.Unassigned {
		f.unassigned = append(f.unassigned, rtnl.NodeRoute{Prefix: prefix, Metric: math.MaxUint32, Unreachable: true})
	}
	for _, route := range want.Routes {
		route.Device = 9
		if !slices.ContainsFunc(f.refused, func(s nodestate.Skipped) bool { return s.Prefix == route.Prefix.String() }) {
			f.present.Routes = append(f.present.Routes, route)
		}
	}
	return f.refused, nil
}

// started returns an agent that runs until the bubble ends.
func started(t *testing.T) *fake {
	t.Helper()
	f := &fake{changed: make(chan time.Time, 1), events: make(chan struct{}, 1), address: "192.0.2.1/24"}
	f.agent = &agent{
		name: "a", config: desired.Config{Mode: desired.ModeTunnel, Device: "ebpfnet0", Port: 4789}, nodes: f, host: f, events: f.events,
		publish:  func(*desired.State) error { f.written++; return nil },
		watching: func(*desired.State, *reconcile.Present) {},
		health:   health.New(stuck), state: filepath.Join(t.TempDir(), "node.json"), log: slog.New(slog.NewTextHandler(&f.output, nil)),
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); f.run(ctx) }()
	t.Cleanup(func() { stop(); <-ended })
	return f
}

func (f *fake) send(nodes ...desired.Node) {
	f.list, f.synced = nodes, true
	wake(f.changed)
}

func wake[T any](channel chan T) {
	select {
	case channel <- *new(T):
	default:
	}
}

// pass lets a time pass on the bubble's clock, until all is quiet.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// ready returns what /readyz says.
func (f *fake) ready() string {
	recorder := httptest.NewRecorder()
	f.health.Handler(http.NotFoundHandler()).ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/readyz", nil))
	return strings.TrimSpace(recorder.Body.String())
}

func (f *fake) want(t *testing.T, when string, routes, written int, ready string) {
	t.Helper()
	if len(f.present.Routes) != routes || f.written > written || f.written < min(written, 1) || !strings.Contains(f.ready(), ready) {
		t.Errorf("%s: got %d routes, %d conflists written, ready %q; want %d, %d, %q",
			when, len(f.present.Routes), f.written, f.ready(), routes, written, ready)
	}
}

var (
	nodeA = desired.Node{Name: "a", PodCIDRs: []string{"10.244.1.0/24"}, Addresses: []string{"192.0.2.1"}}
	nodeB = desired.Node{Name: "b", PodCIDRs: []string{"10.244.2.0/24"}, Addresses: []string{"192.0.2.2"}}
	nodeC = desired.Node{Name: "c", PodCIDRs: []string{"10.244.3.0/24"}, Addresses: []string{"192.0.2.3"}}
)

// TestStart changes nothing before the first full list and before this node is known.
func TestStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.present.Routes = []rtnl.NodeRoute{{Prefix: netip.MustParsePrefix("10.244.2.0/24"), Device: 9}} // of a former agent
		f.err = errors.New("connection refused")
		pass(10 * time.Minute)
		f.want(t, "API down", 1, 0, "has not listed the nodes yet: connection refused")
		f.wantGate(t, "API down", "since boot: the API server has not listed the nodes yet: connection refused")
		f.err = nil
		f.send(nodeB)
		pass(time.Second)
		f.want(t, "this node unknown", 1, 0, "the API has no node a")
		f.wantGate(t, "this node unknown", "since boot: the API has no node a")
		f.send(nodeA, nodeB, nodeC)
		pass(batch)
		f.want(t, "all known", 2, 1, "ok")
		f.wantGate(t, "all known", "")
		f.err = errors.New("connection refused")
		pass(time.Hour)
		f.want(t, "API down again", 2, 100, "ok")
		f.refuse, f.present = errors.New("operation not permitted"), reconcile.Present{}
		pass(time.Hour)
		f.want(t, "refused", 0, 1000, "operation not permitted")
		f.wantGate(t, "refused", "")
	})
}

// wantGate wants the plugin to wait, or to go on.
func (f *fake) wantGate(t *testing.T, when, want string) {
	t.Helper()
	err := nodestate.Check(f.state)
	if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
		t.Errorf("%s: the plugin gets error %v, want %q", when, err, want)
	}
}

// TestStartWithPolicies is ready when the plugin may add containers, which is when the enforcer is ready.
func TestStartWithPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.enforcer = &enforcer{}
		f.send(nodeA, nodeB)
		pass(batch)
		for _, when := range []string{"before the enforcer", "before the agent has told the plugin"} {
			f.want(t, when, 1, 1, errPending.Error())
			f.wantGate(t, when, errPending.Error())
			f.enforcer.isReady.Store(true)
			wake(f.events)
			synctest.Wait()
		}
		pass(batch)
		f.want(t, "both", 1, 2, "ok")
		f.wantGate(t, "both", "")
	})
}

// TestRepair looks again when the host has lost something, at once with an event and in a minute without.
func TestRepair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.send(nodeA, nodeB)
		pass(batch)
		f.present = reconcile.Present{}
		wake(f.events)
		pass(batch)
		f.want(t, "with an event", 1, 10, "ok")
		f.present = reconcile.Present{}
		pass(interval + batch)
		f.want(t, "without one", 1, 10, "ok")
	})
}

// TestMove connects to the API server anew when this host's address is another one.
func TestMove(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.send(nodeA, nodeB)
		pass(10 * time.Minute)
		if f.moved != 0 {
			t.Errorf("got %d new connections for one address, want none", f.moved)
		}
		f.address = "192.0.2.11/24"
		wake(f.events)
		pass(batch)
		if f.moved != 1 {
			t.Errorf("got %d new connections for another address, want 1", f.moved)
		}
	})
}

// TestPeers leaves names and times for operators, also those that an earlier agent has left.
func TestPeers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		odd := nodeC
		odd.PodCIDRs = []string{"nonsense"}
		f.send(nodeA, nodeB, odd)
		pass(batch)
		first := f.wantPeers(t, "b")
		if len(first.Skipped) == 0 || first.Skipped[0].Prefix != "nonsense" {
			t.Errorf("got skipped %+v, want node c's nonsense", first.Skipped)
		}
		f.peers, f.entries = nil, nil // as in a new agent
		f.send(nodeA, nodeB, nodeC)
		pass(time.Hour)
		later := f.wantPeers(t, "b", "c")
		if later.Peers[0] != first.Peers[0] {
			t.Errorf("got %+v of one that stays, want %+v", later.Peers[0], first.Peers[0])
		}
		moved := nodeB
		moved.Addresses = []string{"192.0.2.22"}
		f.send(nodeA, moved, nodeC)
		pass(batch)
		last := f.wantPeers(t, "b", "c")
		if !last.Peers[0].Since.After(later.Peers[0].Since) || last.Peers[1] != later.Peers[1] {
			t.Errorf("got %+v of one that changes and one that stays, want another time of the first alone: before %+v", last.Peers, later.Peers)
		}
	})
}

func (f *fake) wantPeers(t *testing.T, names ...string) nodestate.Peers {
	t.Helper()
	peers, err := nodestate.ReadPeers(f.state)
	var got []string
	for _, peer := range peers.Peers {
		got = append(got, peer.Node)
	}
	if err != nil || !slices.Equal(got, names) {
		t.Fatalf("got peers %v (%v), want %v", got, err, names)
	}
	return peers
}

// TestBatch looks once for many events.
func TestBatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.send(nodeA)
		pass(batch)
		before := f.looks
		for range 50 {
			f.send(nodeA, nodeB)
			wake(f.events)
			time.Sleep(time.Millisecond)
		}
		pass(batch)
		if got := f.looks - before; got != 1 {
			t.Errorf("got %d looks for 100 events in 50 ms, want 1", got)
		}
	})
}

// TestRetry tries again after a failure, soon at first, and says why it is not ready.
func TestRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.refuse = errors.New("operation not permitted")
		f.send(nodeA, nodeB)
		pass(batch)
		f.want(t, "refused", 0, 0, "operation not permitted")
		pass(10 * time.Minute)
		if f.looks > 40 {
			t.Errorf("got %d looks in ten minutes, want fewer and fewer", f.looks)
		}
		f.refuse = nil
		pass(interval + batch)
		f.want(t, "permitted", 1, 1, "ok")
		f.refuse = errors.New("again")
		f.send(nodeA)
		pass(batch)
		f.refuse = nil
		pass(firstRetry + batch)
		f.want(t, "after another failure", 0, 10, "ok")
	})
}

// TestRefused serves the other nodes when the kernel refuses the route to one, reports that one, and tries again.
func TestRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.refused = []nodestate.Skipped{{Node: "b", Prefix: "10.244.2.0/24", Reason: "invalid argument"}}
		f.send(nodeA, nodeB, nodeC)
		pass(batch)
		f.want(t, "one refused", 1, 1, "ok")
		f.wantGate(t, "one refused", "")
		if peers, err := nodestate.ReadPeers(f.state); err != nil || len(peers.Skipped) != 1 || peers.Skipped[0].Node != "b" {
			t.Errorf("got %+v (%v), want node b skipped", peers, err)
		}
		pass(10 * time.Minute)
		if got := strings.Count(f.output.String(), "node=b"); got != 1 || f.looks > 40 {
			t.Errorf("got %d lines about node b and %d looks in ten minutes, want one line, and fewer and fewer looks", got, f.looks)
		}
		if got := strings.Count(f.output.String(), "msg=change"); got != 1 {
			t.Errorf("got %d changes in the log, want one", got)
		}
		f.refused = nil
		pass(interval + batch)
		f.want(t, "taken", 2, 100, "ok")
		f.refused = []nodestate.Skipped{{Node: "b", Prefix: "10.244.2.0/24", Reason: "invalid argument"}}
		f.present = reconcile.Present{}
		wake(f.events)
		pass(batch)
		f.refused = nil
		pass(firstRetry + batch)
		f.want(t, "refused for a second", 2, 100, "ok")
		f.refused = []nodestate.Skipped{{Node: "b", Prefix: "10.244.2.0/24", Reason: "file exists"}, {Node: "c", Prefix: "10.244.3.0/24", Reason: "file exists"}}
		f.present = reconcile.Present{}
		wake(f.events)
		pass(batch)
		f.want(t, "all refused", 0, 100, "refuses the route to every other node, such as 10.244.2.0/24: file exists")
	})
}

// TestLateAddress looks at once when the host gets what was missing, however long that has taken.
func TestLateAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		f.send(desired.Node{Name: "a", PodCIDRs: nodeA.PodCIDRs})
		pass(10 * time.Minute)
		f.want(t, "without an address", 0, 0, "no usable internal address")
		before := f.looks
		wake(f.events)
		pass(batch)
		if f.looks != before+1 {
			t.Errorf("got %d looks for an event, want one", f.looks-before)
		}
	})
}

// TestContested writes no conflist where others would not reach the containers.
func TestContested(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		young := nodeA
		young.Created = time.Unix(2, 0)
		old := nodeB
		old.PodCIDRs, old.Created = nodeA.PodCIDRs, time.Unix(1, 0)
		f.send(young, old, nodeC)
		pass(batch)
		f.want(t, "contested", 1, 0, "node b is older and has 10.244.1.0/24")
		f.wantGate(t, "contested", "since boot: node b is older")
		f.send(young, nodeC)
		pass(batch)
		f.want(t, "the older one gone", 1, 1, "ok")
	})
}

// TestSkippedIsLoggedOnce logs a node when it is skipped first, and when it is skipped for another reason.
func TestSkippedIsLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := started(t)
		odd := nodeB
		odd.PodCIDRs = nil
		f.send(nodeA, odd)
		pass(10 * time.Minute)
		odd.PodCIDRs = []string{"0.0.0.0/0"}
		f.send(nodeA, odd)
		pass(10 * time.Minute)
		if got := strings.Count(f.output.String(), "node=b"); got != 2 {
			t.Errorf("got %d lines about node b, want 2:\n%s", got, f.output.String())
		}
	})
}
