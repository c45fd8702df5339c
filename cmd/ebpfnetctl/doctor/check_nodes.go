package doctor

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

const askAgent = "see the log of ebpfnet-node's pod on this node"

// lookNodes finds whether containers of other nodes can be reached, if a network is a cluster's.
func lookNodes(_ context.Context, h *host) (findings []Finding, err error) {
	clustered := 0
	for _, n := range h.networks {
		if n.config == nil || n.config.Cluster == "" || !n.isTaken {
			continue
		}
		clustered++
		findings = append(findings, h.judgeAgent(n)...)
		findings = append(findings, h.lookRenumbered(n)...)
	}
	unrouted, count, err := h.unroutedNodes()
	findings = append(findings, unrouted...)
	if clustered == 0 && count == 0 {
		return append(findings, good("no network is a cluster's")), err
	}
	return orGood(findings, "%d prefixes of other nodes are known", count), err
}

// judgeAgent returns the complaints of the node agent of a network.
func (h *host) judgeAgent(n *network) (findings []Finding) {
	path := h.path(n.config.Cluster)
	if err := nodestate.Check(path); err != nil {
		return []Finding{wrong(askAgent, "%s: ADD fails: %v", n.name(), err)}
	}
	if state, err := nodestate.Read(path); err == nil && state.Error != "" {
		findings = append(findings, wrong(askAgent, "the node agent of %s: %s", n.name(), state.Error))
	}
	switch policies, err := nodestate.ReadPolicies(path); {
	case err != nil:
		findings = append(findings, wrong(askAgent, "%s: ADD fails: %v", n.name(), err))
	case policies != nil && time.Since(policies.Written) > nodestate.Silence:
		who := map[bool]string{false: "all namespaces", true: "namespaces with NetworkPolicies"}[time.Now().Before(policies.Until)]
		findings = append(findings, wrong(askAgent, "the node agent of %s has enforced no NetworkPolicies since %s: running pods keep their rules, new pods of %s wait",
			n.name(), policies.Written.Format(time.RFC3339), who))
	}
	peers, err := nodestate.ReadPeers(path)
	switch {
	case err != nil:
		findings = append(findings, warning(askAgent, "%v", err))
	case len(peers.Skipped) > 0:
		first := peers.Skipped[0]
		findings = append(findings, warning("correct the Node objects; `ebpfnetctl nodes` lists what is skipped",
			"%d nodes or prefixes of nodes are skipped, such as %s of %s: %s", len(peers.Skipped), first.Prefix, first.Node, first.Reason))
	}
	return findings
}

// lookRenumbered finds containers that have outlived their node's podCIDR: it has joined again, and got another one.
func (h *host) lookRenumbered(n *network) (findings []Finding) {
	subnets := n.subnets()
	if len(subnets) == 0 { // another IPAM plugin's
		return nil
	}
	isOld := func(address admin.Address) bool {
		return !slices.ContainsFunc(subnets, func(subnet netip.Prefix) bool { return subnet.Contains(address.Address) })
	}
	for _, a := range h.attachments {
		if i := slices.IndexFunc(a.Addresses, isOld); i >= 0 && !a.Dead && a.Network == n.file.List.Name {
			name, restart := podOf(a)
			findings = append(findings, wrong(restart, "%s has kept its address %s, and this node has another podCIDR by now: other nodes do not reach it, and its address may be given away", name, a.Addresses[i].Address))
		}
	}
	return findings
}

// podOf returns the name of a container's pod, or of the container, and what starts it again.
func podOf(a *admin.Attachment) (name, restart string) {
	namespace, pod, isPod := strings.Cut(a.Name, "/")
	if !isPod {
		return "container " + containerOf(a), "start it again"
	}
	return "pod " + namespace + "/" + pod, "start it again, such as by kubectl delete pod -n " + word(namespace) + " " + word(pod)
}

// unroutedNodes finds prefixes of other nodes without a route, and counts all. The host's own routes may be a direct way.
func (h *host) unroutedNodes() (findings []Finding, count int, err error) {
	if h.datapath == nil {
		return nil, 0, nil
	}
	nodes, errNodes := maps.Nodes(h.datapath)
	routed, errRoutes := rtnl.RoutedByNodes()
	if err := errors.Join(errNodes, errRoutes); err != nil {
		return nil, 0, err
	}
	unrouted := slices.DeleteFunc(slices.Clone(nodes), func(n maps.Node) bool { return routed[n.Prefix] || n.Mode == maps.NodeDirect })
	if len(unrouted) > 0 {
		findings = append(findings, wrong(askAgent+": it repairs this each minute", "%d of %d prefixes of other nodes have no route, such as %s at %s",
			len(unrouted), len(nodes), unrouted[0].Prefix, unrouted[0].Remote))
	}
	return findings, len(nodes), nil
}
