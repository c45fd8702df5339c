package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

const peersWithin = 5 * time.Second // for the first list of other nodes' pods

// policySource is package objects.
type policySource interface {
	Need(ctx context.Context, pods, peers bool)
	Changed() <-chan time.Time
	HasPolicies() (has, isComplete bool)
	Cluster() (cluster policies.Cluster, isComplete, hasPeers bool)
	Events() (events []policies.Event, isAll bool)
	Err() error
}

// policyTarget is policyHost.
type policyTarget interface {
	LookAtPolicies() (*policies.Present, error)
	ApplyPolicies(*policies.Changes) (warning, err error)
	Denials() (map[policies.Denier]uint64, error)
}

// enforcer keeps rules and classes in the datapath as NetworkPolicies require.
type enforcer struct {
	source   policySource
	host     policyTarget
	compiler *policies.Compiler
	state    string        // path of the agent's state
	grace    time.Duration // how long pods of namespaces without policies start without the agent
	report   func(error)
	wake     func() // the agent, when isReady changes
	log      *slog.Logger
	figures  *figures

	isReady atomic.Bool // the datapath has been as required

	have        *policies.Present // nil: unknown
	isCompiled  bool              // have is what all objects require, but for events
	hasNames    bool              // the file of rules' names has been written
	namespaces  []string          // in the file
	isForAll    bool              // so it says, of namespaces that are not known yet
	hasPolicies bool
	written     time.Time // when the file was
	warned      []string
	needsPeers  time.Time // since when; zero: it does not
	changed     time.Time // when the first event came that the datapath does not follow; zero: none
}

var errPending = errors.New("the API server has not listed what NetworkPolicies need yet")

// errSilent means that pods of all namespaces wait, or are about to.
var errSilent = errors.New("the API server does not say any more which namespaces have policies")

// run enforces until ctx is done. Each minute it looks at the datapath again.
func (e *enforcer) run(ctx context.Context) {
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	retry := time.NewTimer(0) // the first time
	defer retry.Stop()
	e.source.Need(ctx, false, false)
	e.figures.count()
	for delay := firstRetry; ; {
		select {
		case <-ctx.Done():
			return
		case at := <-e.source.Changed():
			if e.changed.IsZero() {
				e.changed = at
			}
			e.settle()
		case <-retry.C:
		case <-ticker.C:
			e.have = nil
			e.figures.count()
		}
		err := e.sync(ctx)
		if !errors.Is(err, errPending) || !e.isReady.Load() || e.source.Err() != nil {
			e.report(e.explain(err))
		}
		switch {
		case err == nil:
			delay = firstRetry
			retry.Stop()
			if !e.changed.IsZero() {
				e.figures.latency.Observe(time.Since(e.changed).Seconds())
				e.changed = time.Time{}
			}
			if !e.isReady.Swap(true) {
				e.wake()
			}
		case errors.Is(err, errPending):
			retry.Reset(firstRetry)
		default:
			e.have = nil
			e.log.Error("NetworkPolicy: " + err.Error())
			retry.Reset(delay)
			delay = min(2*delay, interval)
		}
	}
}

// settle waits for the watches to take events that came with a change.
func (e *enforcer) settle() {
	runtime.Gosched()
	select {
	case <-e.source.Changed():
	default:
	}
}

// explain adds why the API server does not answer. If it has not for long, that is an error.
func (e *enforcer) explain(err error) error {
	refusal := e.source.Err()
	if err == nil && refusal != nil && time.Since(e.written) > nodestate.Silence {
		err = errSilent
	}
	if err == nil {
		return nil
	}
	if refusal != nil {
		err = fmt.Errorf("%w: %w", err, refusal)
	}
	return fmt.Errorf("NetworkPolicy: %w", err)
}

// sync brings the datapath into the required state. Where only pods of other nodes have changed, it looks at no others.
func (e *enforcer) sync(ctx context.Context) error {
	events, isAll := e.source.Events()
	isCompiled := e.isCompiled && e.have != nil
	e.isCompiled = false // unless this succeeds
	if isCompiled && isAll {
		if classes, isAll := e.compiler.Update(events); isAll {
			err := errors.Join(e.change(policies.ClassDifference(classes, e.have)), e.tell(e.namespaces, e.isForAll))
			e.isCompiled = err == nil
			return err
		}
	}
	return e.compile(ctx)
}

// compile compiles all policies.
func (e *enforcer) compile(ctx context.Context) error {
	has, isKnown := e.source.HasPolicies()
	has = has || !isKnown && e.hasPolicies // until it is known again
	e.source.Need(ctx, has, !e.needsPeers.IsZero())
	cluster, isComplete, hasPeers := e.source.Cluster()
	if !isKnown {
		return errPending
	}
	if err := e.announce(cluster); err != nil {
		return err
	}
	if !isComplete && has {
		return errPending
	}
	e.hasPolicies = has
	start := time.Now()
	state := e.compiler.Compile(cluster)
	e.figures.compile.Observe(time.Since(start).Seconds())
	switch {
	case !state.NeedsPeers:
		e.needsPeers = time.Time{}
	case e.needsPeers.IsZero():
		e.needsPeers = time.Now()
	}
	e.source.Need(ctx, has, state.NeedsPeers)
	if state.NeedsPeers && !hasPeers && time.Since(e.needsPeers) < peersWithin {
		return errPending // pods would lose peers that they have
	}
	e.warn(state.Warnings)
	return e.apply(state, hasPeers || !state.NeedsPeers)
}

// announce tells ADD of new namespaces, whose pods wait from now on, also while other objects are not known yet.
func (e *enforcer) announce(cluster policies.Cluster) error {
	told := slices.Clone(e.namespaces)
	for _, policy := range cluster.Policies {
		told = append(told, policy.Namespace)
	}
	return e.tell(told, e.isForAll || len(cluster.ClusterPolicies) > 0)
}

// apply changes the host's policies to the desired ones. At the end it tells ADD which namespaces have policies: before,
// ADD also knows those that had some.
func (e *enforcer) apply(state *policies.State, hasAllPods bool) error {
	if e.have == nil {
		have, err := e.host.LookAtPolicies()
		if err != nil {
			return err
		}
		e.have = have
	}
	changes := policies.Difference(state, e.have, hasAllPods)
	if err := e.change(changes); err != nil {
		return err
	}
	isNamed := e.hasNames && maps.Equal(changes.Want.Pods, e.have.Pods)
	e.have = changes.Want
	e.figures.set(e.have)
	if !isNamed {
		e.hasNames = false
		if err := nodestate.WriteRules(e.state, changes.Want.Rules()); err != nil {
			return err
		}
		e.hasNames = true
	}
	e.isCompiled = hasAllPods
	return e.tell(state.Namespaces, state.IsForAll)
}

func (e *enforcer) change(changes *policies.Changes) error {
	if changes.IsEmpty() {
		return nil
	}
	warning, err := e.host.ApplyPolicies(changes)
	if warning != nil {
		e.log.Warn(warning.Error())
	}
	return err
}

// tell writes which namespaces have policies, and whether unknown ones may. It renews the file each minute, from which ADD knows
// that the agent runs, and hears of new policies.
func (e *enforcer) tell(namespaces []string, isForAll bool) error {
	slices.Sort(namespaces)
	namespaces = slices.Compact(namespaces)
	isTold := slices.Equal(namespaces, e.namespaces) && isForAll == e.isForAll && !e.written.IsZero()
	if isTold && (time.Since(e.written) < interval || e.source.Err() != nil) {
		return nil
	}
	now := time.Now()
	until := now.Add(e.grace)
	if isForAll {
		until = now
	}
	told := nodestate.Policies{Namespaces: namespaces, Until: until.UTC(), Written: now.UTC()}
	if err := nodestate.WritePolicies(e.state, told); err != nil {
		return err
	}
	e.namespaces, e.isForAll, e.written = namespaces, isForAll, now
	return nil
}

// warn logs each warning once. They are sorted.
func (e *enforcer) warn(warnings []string) {
	for _, warning := range warnings {
		if _, isKnown := slices.BinarySearch(e.warned, warning); !isKnown {
			e.log.Warn("NetworkPolicy " + warning)
		}
	}
	e.warned = warnings
}
