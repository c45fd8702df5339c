package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// lookPeers probes every other node of the cluster on the path of containers' packets. The nodes' kernels answer.
func lookPeers(ctx context.Context, h *host) (findings []Finding, err error) {
	if !h.Peers {
		return nil, nil
	}
	peers, err := h.peers()
	if err != nil {
		return nil, err
	}
	found := together(peers, func(p *peer) []Finding { return p.look(ctx) })
	return orGood(slices.Concat(found...), "no other node is known"), nil
}

// together looks at many things at once, because each silence takes its time.
func together[T, R any](things []T, look func(T) R) []R {
	const atOnce = 128

	found := make([]R, len(things))
	slots := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i, thing := range things {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			found[i] = look(thing)
		})
	}
	all.Wait()
	return found
}

// look sends short packets to a node, and if it answers, packets as long as those of containers. After the end of ctx it
// sends none.
func (p *peer) look(ctx context.Context) []Finding {
	if ctx.Err() != nil {
		return []Finding{{State: Unknown, What: p.title() + " was not probed: others took too long"}}
	}
	longest, errs := p.pingAll(func(maps.Node) int { return shortPing })
	failed := slices.IndexFunc(errs, func(err error) bool { return err != nil })
	switch {
	case failed < 0:
		return orGood(p.lookLong(), "%s answers %s in %.2fms; packets of %d bytes pass undivided", p.title(), p.way(), longest.Seconds()*1000, p.needs())
	case slices.Contains(errs, nil):
		return []Finding{wrong("see the log of ebpfnet-node's pod there", "%s answers %s, but not for its containers in %s: %v", p.title(), p.way(), p.prefixes[failed].Prefix, errs[failed])}
	case p.isDirect:
		return []Finding{wrong(fmt.Sprintf("see the node, its firewall, and `ip route get %s`", p.remote), "%s: %v", p.title(), errs[failed])}
	}
	if _, err := ping(p.remote, shortPing); err != nil {
		return []Finding{wrong(fmt.Sprintf("see whether the node runs, and `ip route get %s`", p.remote), "%s answers neither by the tunnel nor itself", p.title())}
	}
	return []Finding{wrong(fmt.Sprintf("let UDP port %d in, on both nodes and between them (a cloud's security groups); see whether ebpfnet-node runs there, with the same --port, and has this node in `ebpfnetctl nodes`", p.port),
		"%s answers, but not by the tunnel: a firewall drops UDP port %d in one of the directions, or that node does not know this one", p.title(), p.port)}
}

// pingAll pings all prefixes of a node, and returns the longest time that an answer takes.
func (p *peer) pingAll(size func(maps.Node) int) (longest time.Duration, errs []error) {
	type answer struct {
		trip time.Duration
		err  error
	}
	for _, a := range together(p.prefixes, func(entry maps.Node) (a answer) {
		a.trip, a.err = ping(entry.Answerer(), size(entry))
		return a
	}) {
		longest, errs = max(longest, a.trip), append(errs, a.err)
	}
	return longest, errs
}

// lookLong finds a link that carries less than the longest packets of containers.
func (p *peer) lookLong() []Finding {
	_, errs := p.pingAll(func(entry maps.Node) int { return entry.MTU })
	_, errOuter := ping(p.remote, p.needs())
	remedy := fmt.Sprintf("find the link (`tracepath %[1]s`, or `ping -M do -s SIZE %[1]s`), raise its MTU, or give ebpfnet-node on all nodes a smaller --mtu and start containers again", p.remote)
	if p.isDirect {
		remedy = fmt.Sprintf("find the link (`tracepath %[1]s`, or `ping -M do -s SIZE %[1]s`), and give all devices on it the same MTU", p.remote)
	}
	err := errors.Join(errs...)
	switch {
	case errors.Is(err, unix.EMSGSIZE):
		return []Finding{warning(remedy, "a link to %s carries no packets of %d bytes: containers learn of it from ICMP errors, and lose their first long packets", p.title(), p.needs())}
	case err != nil:
		return []Finding{wrong(remedy+"; or let ICMP errors pass (too big, fragmentation needed)",
			"%s answers short packets, but none of %d bytes: connections hang as soon as they send much", p.title(), p.needs())}
	case errOuter == nil:
		return nil
	}
	if _, err := ping(p.remote, shortPing); err != nil {
		return nil // the node answers only by the tunnel, where long packets arrive
	}
	return []Finding{warning(remedy, "a link to %s carries no packets of %d bytes, so those in the tunnel are divided: that is slow, and some networks drop the pieces", p.title(), p.needs())}
}

// needs returns the size of the longest packets between the nodes.
func (p *peer) needs() (size int) {
	for _, entry := range p.prefixes {
		size = max(size, entry.OuterMTU())
	}
	return size
}

// peer is another node, with its prefixes that are reached in one way.
type peer struct {
	node     string // "" if it is not known
	remote   netip.Addr
	isDirect bool
	prefixes []maps.Node
	port     uint16 // of the tunnel
}

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
				node: nodes[entry.Prefix], remote: entry.Remote, isDirect: isDirect, port: tunnel.Port,
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
		known, _ := nodestate.ReadPeers(path) // the check nodes reports the error
		for _, p := range known.Peers {
			nodes[p.Prefix] = p.Node
		}
	}
	return nodes
}

func (p *peer) title() string { return fmt.Sprintf("%s (%s)", cmp.Or(p.node, "node"), p.remote) }

func (p *peer) way() string {
	if p.isDirect {
		return "directly"
	}
	return "by the tunnel"
}
