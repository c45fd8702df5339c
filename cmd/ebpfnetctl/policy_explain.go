package main

import (
	"cmp"
	"net/netip"
	"slices"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/trace"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

// explanation is what one direction of a container says about a connection, as schema/policy.json describes it.
type explanation struct {
	admin.Named
	Direction string `json:"direction"`
	admin.Judgment
}

func newPolicyExplain() *cobra.Command {
	var flags output.Flags
	var options trace.Options
	var dirs directories
	cmd := &cobra.Command{
		Use:   "explain FROM TO[:PORT][/PROTO]",
		Short: "why rules admit a connection, or why each of them does not",
		Long: `Judges a new connection by the rules of FROM for egress and of TO for ingress,
as far as they are containers of this host. It names the rule that decides, and
says of each other one what does not match: the peer's namespace or labels, its
address, or the port.

FROM, TO, PORT and PROTO are as in trace. The address of a Service is no TO: the
rules see the pod behind it. A node does not know the labels of pods, only which
selectors of rules match them. Exits with 3 if a direction does not admit it.

` + containerHelp,
		Example:           "  ebpfnetctl policy explain shop/web 10.244.2.7:5432\n  ebpfnetctl policy explain 10.244.2.7 shop/web:8080 -o json",
		Args:              twoWords,
		ValidArgsFunction: completeContainers(&dirs, 2),
		RunE: func(cmd *cobra.Command, words []string) error {
			attachments, err := parseTrace("policy explain", words, dirs, &options)
			if err != nil {
				return err
			}
			list, err := explain(attachments, options)
			if err != nil {
				return err
			}
			p := output.New(cmd.OutOrStdout(), flags)
			err = p.Document(list, "", func() { explanationTable.PrintRows(p, explanationRows(list)) })
			if err == nil && slices.ContainsFunc(list, func(e explanation) bool { return !e.Admits }) {
				return errFound
			}
			return err
		},
	}
	flags.AddToWrite(cmd.Flags())
	dirs.add(cmd)
	cmd.Flags().BoolVarP(&options.IPv6, "ipv6", "6", false, "by IPv6, where both ends have both families")
	return cmd
}

// openExplainer opens what an explainer of the host's rules reads. The caller calls done at the end.
func openExplainer(state string) (explainer *admin.Explainer, done func(), err error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return nil, nil, err
	}
	host, err := rtnl.Open()
	if err != nil {
		datapath.Close()
		return nil, nil, err
	}
	return admin.NewExplainer(datapath, host, state), func() {
		host.Close()
		datapath.Close()
	}, nil
}

// explain judges a connection by the rules of both ends.
func explain(all []*admin.Attachment, o trace.Options) ([]explanation, error) {
	src, dst, err := o.Addresses()
	if err != nil {
		return nil, err
	}
	explainer, done, err := openExplainer(nodestate.Default)
	if err != nil {
		return nil, err
	}
	defer done()
	byAddr := admin.ByAddress(all)
	from, to := byAddr[src], byAddr[dst]
	if o.From.Host {
		from = nil
	}
	list := []explanation{}
	for _, end := range []struct {
		of, peer *admin.Attachment
		addr     netip.Addr
		isEgress bool
	}{{from, to, dst, true}, {to, from, src, false}} {
		if end.of == nil {
			continue
		}
		c := policy.Connection{Protocol: trace.ProtocolOf(o.Protocol, src.Is6()), Port: o.ToPort}
		if c.Peer, err = explainer.PeerOf(end.addr); err != nil {
			return nil, err
		}
		c.Peer.Host = c.Peer.Host || !end.isEgress && o.From.Host
		c.Peer.Self = from != nil && to != nil && from.ContainerID == to.ContainerID
		e, err := explainOne(explainer, end.of, end.peer, end.isEgress, c)
		if err != nil {
			return nil, err
		}
		list = append(list, e)
	}
	return list, nil
}

// explainOne judges a connection with a peer, which is nil if it is no container of this host.
func explainOne(explainer *admin.Explainer, of, peer *admin.Attachment, isEgress bool, c policy.Connection) (explanation, error) {
	pod := ""
	if peer != nil {
		pod = peer.Name
	}
	entry, err := explainer.PolicyOf(of)
	if err != nil {
		return explanation{}, err
	}
	judged, err := explainer.Explain(entry, isEgress, c, pod)
	judged.Candidates = append([]policy.Candidate{}, judged.Candidates...) // no null in JSON
	named := of.Named
	named.Name = cmp.Or(named.Name, judged.Pod)
	return explanation{named, admin.DirectionOf(isEgress), judged}, err
}

// explanationRow is a rule, or the verdict.
type explanationRow struct {
	explanation
	candidate policy.Candidate
}

// explanationRows returns the rules of each direction, and then its verdict.
func explanationRows(list []explanation) (rows []explanationRow) {
	for _, e := range list {
		for _, rule := range e.Candidates {
			rows = append(rows, explanationRow{e, rule})
		}
		why := e.Judgment.String()
		if e.IsAudit && !e.Admits {
			why += "; in audit mode, it passes"
		}
		rows = append(rows, explanationRow{e, policy.Candidate{Admits: e.Admits, Why: why}})
	}
	return rows
}

var explanationTable = output.Table[explanationRow]{
	Columns: []output.Column[explanationRow]{
		{Head: "CONTAINER", Text: func(r explanationRow) string { return r.Title() }},
		{Head: "DIRECTION", Text: func(r explanationRow) string { return r.Direction }},
		{Head: "RULE", Text: func(r explanationRow) string { return r.candidate.Rule }},
		{Head: "ADMITS", Text: func(r explanationRow) string { return map[bool]string{false: "no", true: "yes"}[r.candidate.Admits] }},
		{Head: "WHY", Text: func(r explanationRow) string { return r.candidate.Why }},
	},
	None: "neither end is a container of this host",
}
