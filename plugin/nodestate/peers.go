package nodestate

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/ebpfnet/ebpfnet/plugin/show"
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

// readJSON reads a value from a file, if there is one.
func readJSON(path string, maxSize int64, value any) (exists bool, err error) {
	file, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, maxSize))
	if err == nil {
		err = json.Unmarshal(content, value)
	}
	if err != nil {
		return true, fmt.Errorf("read %s: %w", show.Value(path), err)
	}
	return true, nil
}

// WritePeers replaces the peers, and creates their directory.
func WritePeers(path string, peers Peers) error { return replaceJSON(PeersOf(path), peers) }

func replaceJSON(path string, value any) error {
	const reachable = 0o755

	content, err := json.Marshal(value)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), reachable); err != nil {
		return err
	}
	_, err = Replace(path, append(content, '\n'))
	return err
}
