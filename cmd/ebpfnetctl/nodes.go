package main

import (
	"cmp"
	"slices"
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
	Node   string     `json:"node"`             // empty if it is not known
	Prefix string     `json:"prefix"`           // of its containers
	Remote string     `json:"remote,omitempty"` // its own address
	Mode   string     `json:"mode"`
	MTU    int        `json:"mtu,omitempty"`
	Routed bool       `json:"routed"` // by a route of the node agent
	Since  *time.Time `json:"since,omitempty"`
	Reason string     `json:"reason,omitempty"` // why it is skipped
}

const modeSkipped = "skipped"

func newNodes() *cobra.Command {
	var flags output.Flags
	var state string
	cmd := &cobra.Command{
		Use:   "nodes",
		Short: "other nodes of a cluster, and the ways to their containers",
		Long: `Lists the prefixes of other nodes' containers, as the datapath and the routes
have them: each node's own address, and whether packets go to it by the tunnel,
directly, or by the tunnel until a probe passes (either).

Names, times and what was skipped come from the node agent's files. "ebpfnetctl
doctor" has the agent's errors, and with --peers it probes the nodes.`,
		Example: "  ebpfnetctl nodes\n  ebpfnetctl nodes -o json | jq -r '.[] | select(.routed | not) | .prefix'",
		Args:    noWords,
		RunE: func(cmd *cobra.Command, _ []string) error {
			nodes, err := clusterNodes(state)
			p := output.New(cmd.OutOrStdout(), flags)
			if err != nil {
				return beforeLoad(p, err)
			}
			return nodeTable.Print(p, nodes)
		},
	}
	flags.AddToRead(cmd.Flags())
	cmd.Flags().StringVar(&state, "state", nodestate.Default, "`FILE` of the node agent")
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
	if err != nil {
		return nil, err
	}
	stored := known.ByPrefix()
	slices.SortFunc(entries, func(a, b maps.Node) int { return a.Prefix.Compare(b.Prefix) })
	nodes := []clusterNode{}
	for _, entry := range entries {
		node := clusterNode{
			Prefix: entry.Prefix.String(), Remote: entry.Remote.String(), Mode: entry.Mode.String(), MTU: entry.MTU, Routed: routed[entry.Prefix],
		}
		if peer, ok := stored[entry.Prefix]; ok {
			node.Node, node.Since = peer.Node, &peer.Since
		}
		nodes = append(nodes, node)
	}
	for _, skipped := range known.Skipped {
		nodes = append(nodes, clusterNode{Node: skipped.Node, Prefix: skipped.Prefix, Mode: modeSkipped, Reason: skipped.Reason})
	}
	return nodes, nil
}

var nodeTable = output.Table[clusterNode]{
	Columns: []output.Column[clusterNode]{
		{Head: "NODE", Text: func(n clusterNode) string { return cmp.Or(n.Node, "?") }},
		{Head: "PREFIX", Text: func(n clusterNode) string { return n.Prefix }},
		{Head: "ADDRESS", Text: func(n clusterNode) string { return n.Remote }},
		{Head: "MODE", Text: func(n clusterNode) string { return n.Mode }},
		{Head: "MTU", Text: func(n clusterNode) string { return number(n.MTU) }},
		{Head: "SINCE", Text: clusterNode.since},
		{Head: "ROUTE", Text: clusterNode.route},
	},
	Name: func(n clusterNode) string { return cmp.Or(n.Prefix, n.Node) },
	None: "this host knows no other node",
}

func (n clusterNode) since() string {
	if n.Since == nil {
		return ""
	}
	seconds := time.Since(*n.Since).Seconds()
	return duration(&seconds)
}

func (n clusterNode) route() string {
	switch {
	case n.Mode == modeSkipped:
		return n.Reason
	case n.Routed:
		return "yes"
	case n.Mode == maps.NodeDirect.String():
		return "the host's" // they may be a direct way
	default:
		return "missing"
	}
}
