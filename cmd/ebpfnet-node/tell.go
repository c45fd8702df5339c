package main

import (
	"net/netip"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/health"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/wanted"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// peer is a way to a prefix, and since when it has been that.
type peer struct {
	wanted.Peer
	since time.Time
}

// tell lets the plugin add containers from the first success on, and says why it must not before.
func (a *agent) tell(report health.Report) error {
	before, err := nodestate.Read(a.state)
	state := nodestate.State{Node: a.name, Synced: before.Synced, Error: report.Reasons()}
	if state.Error == "" && state.Synced.IsZero() {
		state.Synced = time.Now().UTC()
	}
	if err == nil && state == before {
		return nil
	}
	return nodestate.Write(a.state, state)
}

// tellPeers leaves for operators what the datapath does not know.
func (a *agent) tellPeers(state *wanted.State) error {
	if a.peers == nil { // those of an earlier agent: their ways are found in the datapath
		a.peers = a.earlierPeers(state)
	}
	peers := make(map[netip.Prefix]peer, len(state.Peers))
	var list nodestate.Peers
	for _, p := range state.Peers {
		since := time.Now().UTC().Truncate(time.Second)
		if before, known := a.peers[p.Prefix]; known && before.Peer == p {
			since = before.since
		}
		peers[p.Prefix] = peer{p, since}
		list.Peers = append(list.Peers, nodestate.Peer{Node: p.Node, Prefix: p.Prefix, Since: since})
	}
	for _, s := range state.Skipped {
		list.Skipped = append(list.Skipped, nodestate.Skipped{Node: s.Node, Prefix: s.Prefix, Reason: s.Reason})
	}
	a.peers = peers
	return nodestate.WritePeers(a.state, list)
}

// earlierPeers returns what an earlier agent has left.
func (a *agent) earlierPeers(state *wanted.State) map[netip.Prefix]peer {
	earlier := map[netip.Prefix]peer{}
	list, err := nodestate.ReadPeers(a.state)
	if err != nil {
		return earlier // it is written anew
	}
	since := map[netip.Prefix]nodestate.Peer{}
	for _, p := range list.Peers {
		since[p.Prefix] = p
	}
	for _, p := range state.Peers {
		if before, known := since[p.Prefix]; known && before.Node == p.Node {
			earlier[p.Prefix] = peer{p, before.Since}
		}
	}
	return earlier
}
