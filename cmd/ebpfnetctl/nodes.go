package main

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// clusterNode is an element of `ebpfnetctl nodes -o json`: schema/nodes.json.
type clusterNode struct {
	Node   string     `json:"node"`             // empty: nobody says
	Prefix string     `json:"prefix"`           // of its containers
	Remote string     `json:"remote,omitempty"` // its own address
	Mode   string     `json:"mode"`
	MTU    int        `json:"mtu,omitempty"`
	Routed bool       `json:"routed"` // by a route of the node agent
	Since  *time.Time `json:"since,omitempty"`
	Reason string     `json:"reason,omitempty"` // why it is skipped

	// With --probe.
	RoundTrip float64 `json:"roundTrip,omitempty"` // in seconds
	PathMTU   int     `json:"pathMTU,omitempty"`   // between the nodes themselves, up to what they need
	Fault     string  `json:"fault,omitempty"`

	entry maps.Node
}

const modeSkipped = "skipped"

func newNodes() *cobra.Command {
	var flags output.Flags
	var state string
	var probe bool
	var wait time.Duration
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "other nodes of a cluster, and the ways to their containers",
		Long: `Lists the prefixes of other nodes' containers, as the datapath and the routes
have them: each node's own address, and whether packets go to it by the tunnel,
directly, or by the tunnel until a probe passes (either).

Names, times and what was skipped come from the node agent's files. If the agent
has a complaint, it is printed last, and the exit code is 1.

--probe asks each node for echoes (ICMP): by the way of containers' packets, and
between the nodes as long as these packets can be. The exit code is 3 if one
does not answer, or if a link on the way takes less.`,
		Example: "  ebpfnetctl nodes\n  ebpfnetctl nodes --probe\n  ebpfnetctl nodes -o json | jq -r '.[] | select(.routed | not) | .prefix'",
		Args:    noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			nodes, err := clusterNodes(state)
			if err != nil {
				return err
			}
			noun, found := nodeNoun, error(nil)
			if probe {
				noun.Columns, found = slices.Insert(slices.Clone(noun.Columns), 5, probeColumns...), probeNodes(nodes, wait)
			}
			if err := errors.Join(noun.Print(output.New(cmd.OutOrStdout(), flags), nodes), complaint(state)); err != nil {
				return err
			}
			return found
		},
	}
	flags.AddToNoun(cmd.Flags())
	cmd.Flags().StringVar(&state, "state", nodestate.Default, "`FILE` of the node agent")
	cmd.Flags().BoolVar(&probe, "probe", false, "ask each node for echoes")
	cmd.Flags().DurationVar(&wait, "wait", time.Second, "`TIME` for an answer, twice")
	return cmd
}

// clusterNodes lists the datapath's entries, and what the agent has skipped.
func clusterNodes(state string) ([]clusterNode, error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return nil, err
	}
	defer datapath.Close()
	entries, err := maps.Nodes(datapath)
	if err != nil {
		return nil, err
	}
	routed, err := rtnl.RoutedByNodes()
	if err != nil {
		return nil, err
	}
	known, err := nodestate.ReadPeers(state)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	told := map[netip.Prefix]nodestate.Peer{}
	for _, peer := range known.Peers {
		told[peer.Prefix] = peer
	}
	slices.SortFunc(entries, func(a, b maps.Node) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()))
	})
	nodes := []clusterNode{}
	for _, entry := range entries {
		node := clusterNode{
			entry: entry, Prefix: entry.Prefix.String(), Remote: entry.Remote.String(), Mode: entry.Mode.String(), MTU: entry.MTU, Routed: routed[entry.Prefix],
		}
		if peer, ok := told[entry.Prefix]; ok {
			node.Node, node.Since = peer.Node, &peer.Since
		}
		nodes = append(nodes, node)
	}
	for _, skipped := range known.Skipped {
		nodes = append(nodes, clusterNode{Node: skipped.Node, Prefix: skipped.Prefix, Mode: modeSkipped, Reason: skipped.Reason})
	}
	return nodes, nil
}

// complaint returns what the agent of this node says, if there is one.
func complaint(path string) error {
	state, err := nodestate.Read(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case state.Synced.IsZero():
		return nodestate.Check(path)
	case state.Error != "":
		return fmt.Errorf("the node agent: %s", state.Error)
	}
	return nil
}

var nodeNoun = output.Noun[clusterNode]{
	Columns: []output.Column[clusterNode]{
		{Head: "NODE", Text: func(n clusterNode) string { return cmp.Or(n.Node, "?") }, Elastic: true},
		{Head: "PREFIX", Text: func(n clusterNode) string { return n.Prefix }},
		{Head: "ADDRESS", Text: func(n clusterNode) string { return n.Remote }},
		{Head: "MODE", Text: func(n clusterNode) string { return n.Mode }},
		{Head: "MTU", Text: clusterNode.mtu, Right: true},
		{Head: "SINCE", Text: clusterNode.since, Right: true},
		{Head: "ROUTE", Text: clusterNode.route, Wraps: true, Color: redIf(clusterNode.isBroken)},
	},
	Name: func(n clusterNode) string { return cmp.Or(n.Prefix, n.Node) },
	None: "this host knows no other node",
}

func (n clusterNode) mtu() string {
	if n.MTU == 0 {
		return ""
	}
	return strconv.Itoa(n.MTU)
}

func (n clusterNode) since() string {
	if n.Since == nil {
		return ""
	}
	seconds := time.Since(*n.Since).Seconds()
	return duration(&seconds)
}

// isBroken returns whether no packet gets to the node: the host's own routes may be a direct way.
func (n clusterNode) isBroken() bool {
	return n.Mode == modeSkipped || n.Fault != "" || !n.Routed && n.Mode != maps.NodeDirect.String()
}

func (n clusterNode) route() string {
	switch {
	case n.Mode == modeSkipped:
		return n.Reason
	case n.Fault != "":
		return n.Fault
	case n.Routed:
		return "yes"
	case n.isBroken():
		return "missing"
	default:
		return "the host's"
	}
}
