package main

import (
	"errors"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/reconcile"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
)

// datapath is to be the maps nodes and cluster (branch tunnel: maps.Nodes, maps.GetTunnel, Store.SetNodes,
// Store.SetTunnel, Store.SetUplink and Datapath.AttachUplink). Until that is merged, the agent does nothing.
type datapath struct{}

var errNoDatapath = errors.New("this build has no map of nodes")

func (datapath) Tunnel() (reconcile.Tunnel, error) { return reconcile.Tunnel{}, errNoDatapath }
func (datapath) SetTunnel(reconcile.Tunnel) error  { return errNoDatapath }
func (datapath) Peers() ([]wanted.Peer, error)     { return nil, errNoDatapath }
func (datapath) SetPeers([]wanted.Peer) error      { return errNoDatapath }
