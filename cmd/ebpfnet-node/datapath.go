package main

import (
	"context"
	"errors"
	"net/netip"
	"time"

	noderec "github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/reconcile"
)

// datapath is the one of this host. Each call opens it anew, because others load, upgrade and unload it, too. It is
// loaded if it is not, and upgraded if its programs are older than the agent's.
type datapath struct {
	maxFlows   uint32 // of one that is loaded; 0: in proportion to the host's memory
	onlyLoaded bool   // one that is not loaded has nothing, and stays so
}

// patience is how long to wait for others that write to the datapath.
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
	if d.onlyLoaded && errors.Is(err, loader.ErrNotLoaded) {
		return nil
	}
	if err != nil {
		return err
	}
	defer loaded.Close()
	return use(ctx, loaded)
}

// Tunnel returns the tunnel, unless its device has lost the programs.
func (d datapath) Tunnel() (tunnel noderec.Tunnel, err error) {
	return tunnel, d.with(func(_ context.Context, dp *loader.Datapath) error {
		known, err := maps.GetTunnel(dp)
		if err != nil || known.IfIndex == 0 {
			return err
		}
		attached, err := dp.UplinkAttached(known.IfIndex)
		if attached {
			tunnel = noderec.Tunnel{
				Index: known.IfIndex, VNI: known.VNI, Port: int(known.Port),
				Outer:      [2]netip.Addr{known.Addr4, known.Addr6},
				Containers: [2]netip.Prefix{known.Containers4, known.Containers6},
			}
		}
		return err
	})
}

// SetTunnel has the programs attached to the device. What there was of one that is gone goes with the next ADD.
func (d datapath) SetTunnel(t noderec.Tunnel) error {
	return d.with(func(ctx context.Context, dp *loader.Datapath) error {
		if t == (noderec.Tunnel{}) {
			return maps.With(ctx, dp, func(store *maps.Store) error { return store.SetTunnel(maps.Tunnel{}) })
		}
		return reconcile.Tunnel(ctx, dp, maps.Tunnel{
			IfIndex: t.Index, VNI: t.VNI, Port: uint16(t.Port), Addr4: t.Outer[0], Addr6: t.Outer[1],
			Containers4: t.Containers[0], Containers6: t.Containers[1],
		})
	})
}

// Peers lists the map of nodes.
func (d datapath) Peers() (peers []wanted.Peer, err error) {
	return peers, d.with(func(_ context.Context, dp *loader.Datapath) error {
		nodes, err := maps.Nodes(dp)
		for _, n := range nodes {
			peers = append(peers, wanted.Peer{
				Prefix: n.Prefix, Remote: n.Remote, Direct: n.Mode == maps.NodeDirect, Either: n.Mode == maps.NodeEither, MTU: n.MTU,
			})
		}
		return err
	})
}

// SetPeers writes what differs.
func (d datapath) SetPeers(peers []wanted.Peer) error {
	var nodes []maps.Node
	for _, p := range peers {
		mode := maps.NodeTunnel
		switch {
		case p.Direct:
			mode = maps.NodeDirect
		case p.Either:
			mode = maps.NodeEither
		}
		nodes = append(nodes, maps.Node{Prefix: p.Prefix, Remote: p.Remote, Mode: mode, MTU: p.MTU})
	}
	return d.with(func(ctx context.Context, dp *loader.Datapath) error {
		return maps.With(ctx, dp, func(store *maps.Store) error { return store.SetNodes(nodes) })
	})
}
