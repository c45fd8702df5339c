package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/health"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

const (
	batch      = 100 * time.Millisecond // for events that come together
	interval   = time.Minute            // between syncs without an event
	firstRetry = time.Second
	stuck      = 3 * interval // max. time between reports
)

// nodeSource is package nodes.
type nodeSource interface {
	Changed() <-chan time.Time
	List() (nodes []desired.Node, synced bool)
	Err() error
	Reconnect()
}

// host is package reconcile.
type host interface {
	Look() (desired.Host, *reconcile.Present, error)
	Apply(*reconcile.Changes, *desired.State, *reconcile.Present) (refused []nodestate.Skipped, err error)
}

// prober is package probe.
type prober interface {
	Set([]desired.Probe)
	Proved() (proved map[netip.Addr]bool, lost map[netip.Addr]time.Time)
}

// agent keeps this host in the state that the nodes require.
type agent struct {
	name      string // of this node
	config    desired.Config
	nodes     nodeSource
	host      host
	events    <-chan struct{}                          // of this host
	publish   func(*desired.State) error               // writes the conflist, last
	watching  func(*desired.State, *reconcile.Present) // sets which events matter
	prober    prober                                   // nil: none
	reconnect func()                                   // other watches; nil: none
	state     string                                   // path of the file that the plugin reads
	health    *health.Health
	enforcer  *enforcer // nil: NetworkPolicy is not enforced
	log       *slog.Logger

	skipped   []nodestate.Skipped             // those that have been logged
	peers     map[netip.Prefix]nodestate.Peer // those in the file; nil: it has not been read
	entries   map[netip.Prefix]maps.Node      // those at the last write of peers; nil: an earlier agent wrote it
	addresses []netip.Addr                    // of the host, at the last look
	lost      map[netip.Addr]time.Time        // those of desired.Host, at the last look
}

// run syncs until ctx is done. After a failed sync, events of this host are ignored until the next one, because the failed
// sync may have caused them.
func (a *agent) run(ctx context.Context) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	retry := time.NewTimer(0) // the first sync
	defer retry.Stop()
	events := a.events
	for delay := firstRetry; ; {
		select {
		case <-ctx.Done():
			return
		case <-a.nodes.Changed():
		case <-events:
		case <-ticker.C:
		case <-retry.C:
		}
		if !a.collect(ctx) {
			return
		}
		report := a.sync()
		report.Err = errors.Join(report.Err, a.writeState(&report))
		a.health.Set(report)
		events = a.events
		isDone := report.Err == nil && report.Refused == 0
		if isDone || report.Took == 0 { // 0: the list of nodes will wake it
			delay = firstRetry
			retry.Stop()
			continue
		}
		if report.Err != nil {
			a.log.Error(report.Err.Error())
		}
		if report.Err != nil && !errors.Is(report.Err, desired.ErrUnknown) {
			events = nil
		}
		retry.Reset(delay)
		delay = min(2*delay, interval)
	}
}

// collect waits for further events. It reports false when ctx is done.
func (a *agent) collect(ctx context.Context) bool {
	together := time.NewTimer(batch)
	defer together.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-a.nodes.Changed():
		case <-a.events:
		case <-together.C:
			return true
		}
	}
}

// sync brings the host into the desired state. While too little is known, it changes nothing.
func (a *agent) sync() health.Report {
	report := health.Report{API: a.nodes.Err()}
	nodes, synced := a.nodes.List()
	if !synced {
		report.Err = errors.New("the API server has not listed the nodes yet")
		if report.API != nil {
			report.Err = fmt.Errorf("%w: %w", report.Err, report.API)
		}
		return report
	}
	start := time.Now()
	report.Err = a.reconcile(nodes, &report)
	report.Took = max(time.Since(start), 1)
	return report
}

func (a *agent) reconcile(nodes []desired.Node, report *health.Report) error {
	facts, have, err := a.host.Look()
	if err != nil {
		return err
	}
	a.reconnectIfMoved(facts)
	if a.prober != nil {
		facts.Proved, facts.Lost = a.prober.Proved()
	}
	state, err := desired.Of(nodes, a.name, a.config, facts)
	if err != nil {
		return err
	}
	err = a.apply(state, have, report)
	a.describe(state, report)
	if err != nil {
		return err
	}
	report.Lost = a.countLost(facts.Lost)
	if err := a.writePeers(state); err != nil {
		return err
	}
	a.watching(state, have)
	if a.prober != nil {
		a.prober.Set(state.Probes)
	}
	if len(state.Problems) > 0 {
		return nil // other nodes do not reach containers of this node: add no more
	}
	return a.publish(state)
}

// apply changes the host. It skips nodes whose routes the kernel refuses. If it refuses all, the reason is on this host, such
// as routes that another network plugin left.
func (a *agent) apply(state *desired.State, have *reconcile.Present, report *health.Report) error {
	changes, err := reconcile.Difference(state, have)
	if err != nil || changes.IsEmpty() {
		return err
	}
	refused, err := a.host.Apply(changes, state, have)
	if changes.Count() > len(refused) {
		a.log.Info("change", "add", len(changes.Add), "replace", len(changes.Replace), "delete", len(changes.Delete),
			"device", changes.CreateDevice || changes.DeleteDevice || changes.SetDevice, "peers", len(state.Nodes))
	}
	state.Skipped = append(state.Skipped, refused...)
	report.Refused = len(refused)
	if err == nil {
		report.Changes = changes.Count() - len(refused)
	}
	if err == nil && len(refused) > 0 && len(refused) == len(state.Routes) {
		err = fmt.Errorf("the kernel refuses the route to every other node, such as %s: %s", refused[0].Prefix, refused[0].Reason)
	}
	return err
}

// reconnectIfMoved closes the connections to the API server when the host loses an address that they may use. Otherwise the
// watch would receive nothing until they time out.
func (a *agent) reconnectIfMoved(facts desired.Host) {
	before := a.addresses
	a.addresses = nil
	for _, link := range facts.Links {
		for _, address := range link.Addresses {
			a.addresses = append(a.addresses, address.Addr())
		}
	}
	if slices.ContainsFunc(before, func(addr netip.Addr) bool { return !slices.Contains(a.addresses, addr) }) {
		a.nodes.Reconnect()
		if a.reconnect != nil {
			a.reconnect()
		}
	}
}

// countLost returns how many nodes have been lost since the last sync.
func (a *agent) countLost(lost map[netip.Addr]time.Time) (count int) {
	for node, since := range lost {
		if !a.lost[node].Equal(since) {
			count++
		}
	}
	a.lost = lost
	return count
}

// describe fills in the report, and logs each skipped node once.
func (a *agent) describe(state *desired.State, report *health.Report) {
	report.Problems, report.Skipped = state.Problems, len(state.Skipped)
	for _, node := range state.Nodes {
		if node.Mode == maps.NodeDirect {
			report.Direct++
		} else {
			report.Tunnel++
		}
	}
	for _, skip := range state.Skipped {
		if !slices.Contains(a.skipped, skip) {
			a.log.Warn("node skipped: "+skip.Reason, "node", skip.Node, "prefix", skip.Prefix)
		}
	}
	a.skipped = state.Skipped
}

// writeState lets the plugin add containers from the first success on, and gives the reason why it must not before.
func (a *agent) writeState(report *health.Report) error {
	before, err := nodestate.Read(a.state)
	synced := before.Synced
	if synced.IsZero() {
		synced = before.Policed
	}
	if synced.IsZero() && a.enforcer != nil && !a.enforcer.isReady.Load() {
		report.Pending = errPending
	}
	state := nodestate.State{Node: a.name, Error: report.Reasons()}
	if synced.IsZero() && state.Error == "" {
		synced = time.Now().UTC()
	}
	if a.enforcer != nil {
		state.Policed = synced
	} else {
		state.Synced = synced
	}
	if err == nil && state == before {
		return nil
	}
	return nodestate.Write(a.state, state)
}

// writePeers writes what the datapath has not: the names of nodes, since when each entry is as it is, and which nodes are
// skipped. An entry that an earlier agent wrote keeps its time.
func (a *agent) writePeers(state *desired.State) error {
	if a.peers == nil {
		earlier, _ := nodestate.ReadPeers(a.state) // a file that cannot be read is replaced
		a.peers = earlier.ByPrefix()
	}
	peers, entries := map[netip.Prefix]nodestate.Peer{}, map[netip.Prefix]maps.Node{}
	file := nodestate.Peers{Skipped: state.Skipped}
	for _, node := range state.Nodes {
		peer := nodestate.Peer{Node: state.Names[node.Prefix], Prefix: node.Prefix, Since: time.Now().UTC().Truncate(time.Second)}
		before, isKnown := a.peers[node.Prefix]
		if isKnown && before.Node == peer.Node && (a.entries == nil || a.entries[node.Prefix] == node) {
			peer.Since = before.Since
		}
		peers[node.Prefix], entries[node.Prefix] = peer, node
		file.Peers = append(file.Peers, peer)
	}
	a.peers, a.entries = peers, entries
	return nodestate.WritePeers(a.state, file)
}
