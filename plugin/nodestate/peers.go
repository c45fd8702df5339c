package nodestate

import (
	"net/netip"
	"path/filepath"
	"time"
)

// Peers has what the datapath does not know about other nodes.
type Peers struct {
	Peers   []Peer    `json:"peers"`
	Skipped []Skipped `json:"skipped"`
}

// Peer is a prefix of another node.
type Peer struct {
	Node   string       `json:"node"`
	Prefix netip.Prefix `json:"prefix"`
	Since  time.Time    `json:"since"` // when the route to it last changed
}

// Skipped is a prefix of a node, or a node, that is not reached as it should be.
type Skipped struct {
	Node   string `json:"node"`
	Prefix string `json:"prefix"` // as in the Node object; empty: the node
	Reason string `json:"reason"`
}

// PeersOf returns the path of the peers of the agent whose state is at path.
func PeersOf(path string) string { return filepath.Join(filepath.Dir(path), "peers.json") }

// ByPrefix returns the peers by their prefixes.
func (p Peers) ByPrefix() map[netip.Prefix]Peer {
	peers := map[netip.Prefix]Peer{}
	for _, peer := range p.Peers {
		peers[peer.Prefix] = peer
	}
	return peers
}

// ReadPeers reads the peers of the agent whose state is at path. Without a file there are none.
func ReadPeers(path string) (peers Peers, err error) {
	const maxSize = 1 << 26 // bytes; a peer has 100
	_, err = readJSON(PeersOf(path), maxSize, &peers)
	return peers, err
}

// WritePeers replaces the peers, and creates their directory.
func WritePeers(path string, peers Peers) error { return replaceJSON(PeersOf(path), peers) }
