package main

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/policies"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

// datapath is the datapath of this host. Each call opens it again, because others load, upgrade and unload it, too. A call
// loads it if necessary, and upgrades programs that are older than the agent's.
type datapath struct {
	maxFlows   uint32 // if a call loads it; 0: in proportion to the host's memory
	onlyLoaded bool   // calls do not load it
}

// patience is the time to wait for others that write to the datapath.
const patience = 10 * time.Second

// with calls use with the open datapath.
func (d datapath) with(use func(context.Context, *loader.Datapath) error) error {
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	if !d.onlyLoaded {
		loaded, err := loader.Open(ctx, loader.Options{MaxFlows: d.maxFlows})
		if err != nil {
			return err
		}
		loaded.Close()
	}
	loaded, err := loader.OpenLoaded() // with the maps of clusters
	if err != nil {
		if d.onlyLoaded {
			return ignoreNotLoaded(err)
		}
		return err
	}
	defer loaded.Close()
	return use(ctx, loaded)
}

// Tunnel returns the tunnel, or none if its device has lost the programs.
func (d datapath) Tunnel() (tunnel maps.Tunnel, err error) {
	err = d.with(func(_ context.Context, dp *loader.Datapath) error {
		known, err := maps.GetTunnel(dp)
		if err != nil || known.IfIndex == 0 {
			return err
		}
		attached, err := dp.UplinkAttached(known.IfIndex)
		if attached {
			tunnel = known
		}
		return err
	})
	return tunnel, err
}

// SetTunnel attaches the programs to the device. The next ADD removes the entry of a device that is gone.
func (d datapath) SetTunnel(tunnel maps.Tunnel) error {
	return d.with(func(ctx context.Context, dp *loader.Datapath) error {
		if tunnel == (maps.Tunnel{}) {
			return maps.With(ctx, dp, func(store *maps.Store) error { return store.SetTunnel(tunnel) })
		}
		return refresh.Tunnel(ctx, dp, tunnel)
	})
}

// Nodes lists the other nodes that the datapath has.
func (d datapath) Nodes() (nodes []maps.Node, err error) {
	err = d.with(func(_ context.Context, dp *loader.Datapath) (err error) {
		nodes, err = maps.Nodes(dp)
		return err
	})
	return nodes, err
}

// SetNodes writes those that differ.
func (d datapath) SetNodes(nodes []maps.Node) error {
	return d.with(func(ctx context.Context, dp *loader.Datapath) error {
		return maps.With(ctx, dp, func(store *maps.Store) error { return store.SetNodes(nodes) })
	})
}

// policyHost is the datapath for the enforcer, which changes it often.
type policyHost struct {
	datapath
	open *loader.Datapath // between changes; nil: not
}

// LookAtPolicies returns what the datapath has of NetworkPolicies.
func (h *policyHost) LookAtPolicies() (have *policies.Present, err error) {
	h.close()
	have = &policies.Present{}
	err = h.with(func(_ context.Context, dp *loader.Datapath) (err error) {
		have, err = policies.Look(dp)
		return err
	})
	return have, err
}

// ApplyPolicies changes the datapath. It loads none, which costs more than most changes: LookAtPolicies does, each minute.
func (h *policyHost) ApplyPolicies(changes *policies.Changes) (warning, err error) {
	ctx, stop := context.WithTimeout(context.Background(), patience)
	defer stop()
	for {
		isNew := h.open == nil
		if isNew {
			if h.open, err = loader.OpenLoaded(); err != nil {
				h.open = nil
				return nil, err
			}
		}
		before := changes.Prepare(h.open)
		err = maps.With(ctx, h.open, func(store *maps.Store) (err error) {
			warning, err = changes.Apply(h.open, store)
			return err
		})
		warning = errors.Join(before, warning)
		if err != nil {
			h.close()
		}
		if isNew || !errors.Is(err, loader.ErrNotLoaded) {
			return warning, err
		}
	}
}

// Denials counts the packets that rules of pods have dropped.
func (d datapath) Denials() (denials map[policies.Denier]uint64, err error) {
	d.onlyLoaded = true
	err = d.with(func(_ context.Context, dp *loader.Datapath) (err error) {
		denials, err = policies.Denials(dp)
		return err
	})
	return denials, err
}

func (h *policyHost) close() {
	if h.open != nil {
		h.open.Close()
		h.open = nil
	}
}

func ignoreNotLoaded(err error) error {
	if errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	return err
}

// endPolicies removes all that an earlier agent has enforced, and waits until ctx is done.
func (h *policyHost) endPolicies(ctx context.Context, state string, log *slog.Logger) {
	for delay := firstRetry; ctx.Err() == nil; delay = min(2*delay, interval) {
		err := h.removePolicies(state)
		if err == nil {
			<-ctx.Done()
			return
		}
		log.Error("end NetworkPolicy: " + err.Error())
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

// removePolicies first tells ADD.
func (h *policyHost) removePolicies(state string) error {
	if err := nodestate.RemovePolicies(state); err != nil {
		return err
	}
	have, err := h.LookAtPolicies()
	if err != nil {
		return err
	}
	defer h.close()
	_, err = h.ApplyPolicies(policies.Difference(&policies.State{}, have, true))
	return err
}
