package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/health"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
)

const (
	batch      = 100 * time.Millisecond // for events that come together
	interval   = time.Minute            // between looks without an event
	firstRetry = time.Second
	stuck      = 3 * interval // a sync takes no longer
)

// nodeSource is package nodes.
type nodeSource interface {
	Changed() <-chan struct{}
	List() (nodes []wanted.Node, synced bool)
	Err() error
	Reconnect()
}

// host is package reconcile.
type host interface {
	Look() (wanted.Host, *reconcile.Present, error)
	Apply(*reconcile.Changes, *wanted.State, *reconcile.Present) (refused []wanted.Skip, err error)
}

// prober is package probe.
type prober interface {
	Set([]wanted.Probe)
	Proved() map[netip.Addr]bool
}

// agent keeps this host as the nodes say.
type agent struct {
	name     string // of this node
	config   wanted.Config
	nodes    nodeSource
	host     host
	events   <-chan struct{}                         // of this host
	publish  func(*wanted.State) error               // the conflist, when all else is there
	watching func(*wanted.State, *reconcile.Present) // which events count from now on
	prober   prober                                  // nil: none
	state    string                                  // path of what the plugin is told
	health   *health.Health
	log      *slog.Logger

	told      []wanted.Skip // what has been logged
	peers     map[netip.Prefix]peer
	addresses []netip.Addr // of the host, at the last look
}

// run syncs until ctx is done. After a failure, events of this host wait for the next attempt, because the failed one
// may have caused them.
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
		report.Err = errors.Join(report.Err, a.tell(report))
		a.health.Note(report)
		events = a.events
		isDone := report.Err == nil && report.Refused == 0
		if isDone || report.Took == 0 { // what it waits for will wake it
			delay = firstRetry
			retry.Stop()
			continue
		}
		if report.Err != nil {
			a.log.Error(report.Err.Error())
		}
		if report.Err != nil && !errors.Is(report.Err, wanted.ErrUnknown) {
			events = nil
		}
		retry.Reset(delay)
		delay = min(2*delay, interval)
	}
}

// collect waits for events that come together with the one that has come.
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

// sync makes the host have what is wanted. As long as too little is known, it changes nothing.
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

func (a *agent) reconcile(nodes []wanted.Node, report *health.Report) error {
	facts, have, err := a.host.Look()
	if err != nil {
		return err
	}
	a.reconnectIfMoved(facts)
	if a.prober != nil {
		facts.Proved = a.prober.Proved()
	}
	state, err := wanted.Of(nodes, a.name, a.config, facts)
	if err != nil {
		return err
	}
	err = a.apply(state, have, report)
	a.describe(state, report)
	if err != nil {
		return err
	}
	if err := a.tellPeers(state); err != nil {
		return err
	}
	a.watching(state, have)
	if a.prober != nil {
		a.prober.Set(state.Probes)
	}
	if len(state.Problems) > 0 {
		return nil // others do not reach containers of this node: no more of them
	}
	return a.publish(state)
}

// apply makes the host have the state. What the kernel refuses of other nodes is skipped; if that is all, the reason is
// here, such as routes that another network plugin has left.
func (a *agent) apply(state *wanted.State, have *reconcile.Present, report *health.Report) error {
	changes, err := reconcile.Difference(state, have)
	if err != nil || changes.IsEmpty() {
		return err
	}
	refused, err := a.host.Apply(changes, state, have)
	if changes.Count() > len(refused) {
		a.log.Info("change", "add", len(changes.Add), "replace", len(changes.Replace), "delete", len(changes.Delete),
			"device", changes.CreateDevice || changes.DeleteDevice || changes.SetDevice, "peers", len(state.Peers))
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

// reconnectIfMoved drops connections to the API server when an address is gone that they may have. Nobody answers them,
// so the watch would be silent until they time out.
func (a *agent) reconnectIfMoved(facts wanted.Host) {
	before := a.addresses
	a.addresses = nil
	for _, link := range facts.Links {
		for _, address := range link.Addresses {
			a.addresses = append(a.addresses, address.Addr())
		}
	}
	if slices.ContainsFunc(before, func(addr netip.Addr) bool { return !slices.Contains(a.addresses, addr) }) {
		a.nodes.Reconnect()
	}
}

// describe notes what is wanted, and logs which nodes are skipped when that changes.
func (a *agent) describe(state *wanted.State, report *health.Report) {
	report.Problems, report.Skipped = state.Problems, len(state.Skipped)
	for _, peer := range state.Peers {
		if peer.Direct {
			report.Direct++
		} else {
			report.Tunnel++
		}
	}
	for _, skip := range state.Skipped {
		if !slices.Contains(a.told, skip) {
			a.log.Warn("node skipped: "+skip.Reason, "node", skip.Node, "prefix", skip.Prefix)
		}
	}
	a.told = state.Skipped
}
