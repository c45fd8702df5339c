package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// PeersTimeout is how long Peers begins to ask further nodes.
const PeersTimeout = time.Minute

const checkPeers = "peers"

// Peers asks each other node of the cluster, by the way that containers' packets take. Nothing of ours has to run there:
// kernels answer.
func Peers(ctx context.Context, options Options) (findings []Finding, err error) {
	const atOnce = 128

	h, err := newHost(options)
	if err != nil {
		return nil, err
	}
	defer h.close()
	peers, err := h.peers()
	if err != nil {
		return nil, err
	}
	found := make([][]Finding, len(peers))
	slots := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i, p := range peers {
		all.Go(func() {
			select {
			case <-ctx.Done():
				found[i] = []Finding{{State: Unknown, What: p.title() + " was not asked: others took too long"}}
			case slots <- struct{}{}:
				found[i] = p.look()
				<-slots
			}
		})
	}
	all.Wait()
	for _, f := range orGood(slices.Concat(found...), "no other node is known") {
		f.Check = checkPeers
		findings = append(findings, f)
	}
	return findings, nil
}

// peer is another node, with its prefixes that are reached in one way.
type peer struct {
	node     string // "": nobody says
	remote   netip.Addr
	isDirect bool
	prefixes []maps.Node
	tunnel   string // the device, if it is not reached directly
	port     uint16 // of the tunnel
	uplink   string // the device towards the node
}

// peers lists the datapath's nodes.
func (h *host) peers() (peers []*peer, err error) {
	if h.datapath == nil {
		return nil, nil
	}
	entries, err := maps.Nodes(h.datapath)
	if err != nil {
		return nil, err
	}
	tunnel, err := maps.GetTunnel(h.datapath)
	if err != nil {
		return nil, err
	}
	slices.SortFunc(entries, func(a, b maps.Node) int {
		return cmp.Or(a.Remote.Compare(b.Remote), cmp.Compare(a.Mode, b.Mode), a.Prefix.Addr().Compare(b.Prefix.Addr()))
	})
	nodes := h.nodesOfPrefixes()
	for _, entry := range entries {
		isDirect := entry.Mode == maps.NodeDirect
		if n := len(peers); n == 0 || peers[n-1].remote != entry.Remote || peers[n-1].isDirect != isDirect {
			peers = append(peers, &peer{
				node: nodes[entry.Prefix], remote: entry.Remote, isDirect: isDirect,
				tunnel: h.deviceName(tunnel.IfIndex), port: tunnel.Port, uplink: h.uplinkTo(entry.Remote),
			})
		}
		last := peers[len(peers)-1]
		last.prefixes = append(last.prefixes, entry)
	}
	return peers, nil
}

// nodesOfPrefixes returns the names of nodes, as far as an agent has left them.
func (h *host) nodesOfPrefixes() map[netip.Prefix]string {
	nodes := map[netip.Prefix]string{}
	paths := []string{h.path(nodestate.Default)}
	for _, n := range h.ours() {
		if n.config.Cluster != "" {
			paths = append(paths, h.path(n.config.Cluster))
		}
	}
	for _, path := range paths {
		known, err := nodestate.ReadPeers(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			continue // the check nodes tells
		}
		for _, p := range known.Peers {
			nodes[p.Prefix] = p.Node
		}
	}
	return nodes
}

// uplinkTo returns the device towards a node.
func (h *host) uplinkTo(remote netip.Addr) string {
	route, err := link.RouteTo(h.rtnl, remote)
	if err != nil {
		return "?"
	}
	return h.deviceName(route.Device)
}

func (h *host) deviceName(index int) string {
	if device := h.device(index); device != nil {
		return device.Attrs().Name
	}
	return "?"
}

func (p *peer) title() string { return fmt.Sprintf("%s (%s)", cmp.Or(p.node, "node"), p.remote) }

func (p *peer) way() string {
	if p.isDirect {
		return "directly"
	}
	return "by the tunnel"
}
