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

// PeersTimeout is after how long Peers starts no further probes.
const PeersTimeout = time.Minute

const checkPeers = "peers"

// Peers probes every other node of the cluster, by the way that containers' packets take. Nothing of ours has to run
// there: kernels answer.
func Peers(ctx context.Context, options Options) (findings []Finding, err error) {
	h, err := newHost(options)
	if err != nil {
		return nil, err
	}
	defer h.close()
	peers, err := h.peers()
	if err != nil {
		return nil, err
	}
	found, err := probe(ctx, peers, (*peer).look)
	if err != nil {
		return nil, err
	}
	for _, f := range orGood(found, "no other node is known") {
		f.Check = checkPeers
		findings = append(findings, f)
	}
	return findings, nil
}

// probe looks at many nodes at once. At the end of ctx it leaves those alone that have not answered.
func probe(ctx context.Context, peers []*peer, look func(*peer) []Finding) ([]Finding, error) {
	const atOnce = 128

	starts, cancel := context.WithTimeout(ctx, PeersTimeout)
	defer cancel()
	found := make([][]Finding, len(peers))
	slots := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i, p := range peers {
		all.Go(func() {
			select {
			case <-starts.Done():
				found[i] = []Finding{{State: Unknown, What: p.title() + " was not probed: others took too long"}}
			case slots <- struct{}{}:
				found[i] = look(p)
				<-slots
			}
		})
	}
	ended := make(chan struct{})
	go func() { all.Wait(); close(ended) }()
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-ended:
		return slices.Concat(found...), nil
	}
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
	if err := h.whyNotOpen(); err != nil || h.datapath == nil {
		return nil, err
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
