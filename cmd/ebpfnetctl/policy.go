package main

import (
	"cmp"
	"errors"
	"math"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/policy"
)

func newPolicy() *cobra.Command {
	var o containerOptions
	cmd := o.addTo(&cobra.Command{
		Use:   "policy [CONTAINER]...",
		Short: "who may talk to containers, and to whom they may talk",
		Long: `Prints what isolates containers, from the maps of the datapath: one line for
each rule, in the words of the key policy or of NetworkPolicy. Without CONTAINER
it lists those that have rules. RULE is the rule's place in the policy, or its
NetworkPolicy and place there; where two rules admit the same, the first one has
it. Rules of ingressPolicy have no place.

"ebpfnetctl policy explain" says why rules admit a connection, or why not.`,
		Example: `  ebpfnetctl policy
  ebpfnetctl policy web db
  ebpfnetctl policy web -o json | jq .[].egress
  ebpfnetctl policy explain shop/web shop/db-0:5432`,
	}, func(_ *cobra.Command, p *output.Printer) error { return printPolicies(p, &o) })
	cmd.Args, cmd.ValidArgsFunction = cobra.ArbitraryArgs, completeContainers(&o.dirs, math.MaxInt)
	cmd.AddCommand(newPolicyExplain(), newPolicyPreview())
	return cmd
}

func printPolicies(p *output.Printer, o *containerOptions) error {
	all, shown, errAttachments := o.attachments()
	if shown == nil {
		return errAttachments
	}
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return err
	}
	defer datapath.Close()
	policies, err := admin.Policies(datapath, shown, all)
	if len(o.words) == 0 {
		policies = slices.DeleteFunc(policies, func(p admin.Policy) bool { return p.Mode == "" })
	}
	if p.ForPrograms() || p.Format == output.Name {
		return errors.Join(errAttachments, err, policyNames.Print(p, policies))
	}
	rows := []policyRow{}
	for _, its := range policies {
		rows = append(append(rows, rowsOf(its, "ingress", its.Ingress)...), rowsOf(its, "egress", its.Egress)...)
	}
	policyTable.PrintRows(p, rows)
	return errors.Join(errAttachments, err)
}

// policyNames prints policies for programs.
var policyNames = output.Table[admin.Policy]{Name: func(p admin.Policy) string { return containerName(p.Named) }}

// policyRow is a line of the table: what a rule admits.
type policyRow struct {
	admin.Policy
	direction, rule, ports, peers string
}

var policyTable = output.Table[policyRow]{
	Columns: []output.Column[policyRow]{
		{Head: "NETWORK", Text: func(r policyRow) string { return r.Network }, Wide: true},
		{Head: "CONTAINER", Text: func(r policyRow) string { return r.Title() }},
		{Head: "INTERFACE", Text: func(r policyRow) string { return r.IfName }, Wide: true},
		{Head: "MODE", Text: func(r policyRow) string { return r.Mode }},
		{Head: "DIRECTION", Text: func(r policyRow) string { return r.direction }},
		{Head: "RULE", Text: func(r policyRow) string { return r.rule }},
		{Head: "PORTS", Text: func(r policyRow) string { return cmp.Or(r.ports, "any") }},
		{Head: "PEERS", Text: func(r policyRow) string { return r.peers }},
	},
	None: "no container has rules",
}

// unique removes repeated texts: classes of one selector.
func unique(all []string) (list []string) {
	for _, text := range all {
		if !slices.Contains(list, text) {
			list = append(list, text)
		}
	}
	return list
}

// rowsOf returns what one direction admits.
func rowsOf(its admin.Policy, name string, d *admin.Direction) (rows []policyRow) {
	row := policyRow{Policy: its, direction: name}
	add := func(rule, ports, peers string) {
		row.rule, row.ports, row.peers = rule, ports, peers
		rows = append(rows, row)
	}
	switch {
	case d == nil:
		add("", "", "any: not isolated")
		return rows
	case d.Host:
		add("", "", "own node")
	case len(d.Rules) == 0:
		add("", "", "none")
	}
	for _, name := range d.Policies {
		isIts := func(rule policy.Decompiled) bool { return strings.HasPrefix(rule.Rule, name+" ") }
		if !slices.ContainsFunc(d.Rules, isIts) {
			add(name, "", "none")
		}
	}
	for _, rule := range d.Rules {
		peers := strings.Join(unique(texts(rule.Peers, policy.DecompiledPeer.String)), ", ")
		ports := strings.Join(texts(rule.Ports, policy.DecompiledPorts.String), ",")
		add(rule.Rule, ports, cmp.Or(peers, "any"))
	}
	return rows
}
