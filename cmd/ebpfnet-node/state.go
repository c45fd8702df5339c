package main

import (
	"net/netip"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/health"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// writeState lets the plugin add containers from the first success on, and gives the reason why it must not before.
func (a *agent) writeState(report health.Report) error {
	before, err := nodestate.Read(a.state)
	synced := before.Synced
	if synced.IsZero() {
		synced = before.Policed
	}
	state := nodestate.State{Node: a.name, Error: report.Reasons()}
	if synced.IsZero() && state.Error == "" && a.enforcer != nil && !a.enforcer.isReady.Load() {
		state.Error = errPending.Error()
	}
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
