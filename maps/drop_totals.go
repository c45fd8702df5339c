package maps

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// DropCount counts the packets dropped for one reason since the datapath was loaded.
type DropCount struct {
	Reason  Reason
	Packets uint64
	Bytes   uint64
}

// Reason is why a packet was dropped.
type Reason bpf.Reason

// reasons names and describes the numbers of enum reason in bpf/abi_drop.h.
var reasons = [bpf.ReasonMax]struct{ name, text string }{
	bpf.ReasonNoSource:      {"no-source", "uplink has no address to masquerade with"},
	bpf.ReasonNoPort:        {"no-port", "no masquerading port left, or no place for the connection"},
	bpf.ReasonFragment:      {"fragment", "fragment cannot be masqueraded"},
	bpf.ReasonProtocol:      {"protocol", "protocol cannot be masqueraded"},
	bpf.ReasonTruncated:     {"truncated", "packet shorter than its headers say"},
	bpf.ReasonRewrite:       {"rewrite", "kernel refused to rewrite the packet"},
	bpf.ReasonNoFlow:        {"no-flow", "flow of a translated connection is lost"},
	bpf.ReasonMAC:           {"mac", "source MAC address is not the container's"},
	bpf.ReasonAddress:       {"address", "source address is not the container's"},
	bpf.ReasonGateway:       {"gateway", "source address is the gateway's"},
	bpf.ReasonARP:           {"arp", "ARP for an address that is not the container's"},
	bpf.ReasonNeighbor:      {"neighbor", "neighbor discovery for an address that is not the container's"},
	bpf.ReasonRouter:        {"router", "router advertisement or redirect from a container"},
	bpf.ReasonDHCPServer:    {"dhcp-server", "DHCP server message from a container"},
	bpf.ReasonHeaders:       {"headers", "IPv6 headers that hide the payload"},
	bpf.ReasonPolicyIngress: {"policy-ingress", "the receiver's rules do not admit the sender"},
	bpf.ReasonPolicyEgress:  {"policy-egress", "the sender's rules do not admit the receiver"},
	bpf.ReasonPolicyAudit:   {"policy-audit", "not dropped: rules in audit mode do not admit it"},
	bpf.ReasonSrcRange:      {"src-range", "client outside the host port's portSources"},
	bpf.ReasonICMPError:     {"icmp-error", "ICMP error about another's connection"},
	bpf.ReasonNextHop:       {"next-hop", "gateway of the container's route is not here"},
	bpf.ReasonTunnel:        {"tunnel", "packet for a tunnel of the host"},
	bpf.ReasonBridge:        {"bridge", "message for bridges from a container"},
	bpf.ReasonNode:          {"node", "not from the node that has its source, or for no container here"},
	bpf.ReasonNoEndpoint:    {"no-endpoint", "from another node, for an address that no container has"},
	bpf.ReasonOwnSource:     {"own-source", "from outside, with the address of a container of this host"},
	bpf.ReasonNoOffload:     {"no-offload", "not dropped: no place for the connection on the fast path (maxFlows)"},
}

// advice says what to do about drops whose cause is outside of the host.
var advice = map[Reason]string{
	Reason(bpf.ReasonOwnSource): "see `ebpfnetctl drops`. Either a router or load balancer sends a container's packets back: have it translate their " +
		"source, or masquerade them (ipMasq, nonMasqueradeCIDRs). Or a host on the link forges them",
}

// Advice returns what to do about drops for the reason, or "".
func (r Reason) Advice() string { return advice[r] }

// IsDrop reports whether the packets that are counted for the reason were dropped.
func (r Reason) IsDrop() bool {
	return bpf.Reason(r) != bpf.ReasonPolicyAudit && bpf.Reason(r) != bpf.ReasonNoOffload
}

// String describes the reason.
func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r].text
	}
	return fmt.Sprintf("reason %d", uint32(r))
}

// Name returns one word for the reason: its name in bpf/abi_drop.h.
func (r Reason) Name() string {
	if int(r) < len(reasons) {
		return reasons[r].name
	}
	return strconv.Itoa(int(r))
}

// ParseReason returns the reason with a name.
func ParseReason(name string) (r Reason, ok bool) {
	i := slices.IndexFunc(reasons[:], func(known struct{ name, text string }) bool { return known.name == name })
	return Reason(i), i >= 0
}

// ReasonNames lists the names of all reasons.
func ReasonNames() (names []string) {
	for _, known := range reasons {
		names = append(names, known.name)
	}
	return names
}

// DropTotals returns the counter of every reason, in the order of their numbers.
func DropTotals(dp *loader.Datapath) ([]DropCount, error) {
	var list []DropCount
	for reason := range bpf.Reason(min(uint32(bpf.ReasonMax), dp.DropTotals.MaxEntries())) { // an older version has fewer
		var perCPU []bpf.DropCount
		if err := dp.DropTotals.Lookup(uint32(reason), &perCPU); err != nil {
			return nil, fmt.Errorf("read drop total %d: %w", reason, err)
		}
		sum := DropCount{Reason: Reason(reason)}
		for _, c := range perCPU {
			sum.Packets += c.Packets
			sum.Bytes += c.Bytes
		}
		list = append(list, sum)
	}
	return list, nil
}

// Drop counts the packets of one attachment that were dropped for one reason.
type Drop struct {
	Owner loader.Owner
	DropCount
}

// Drops lists the counters of all attachments, sorted by owner and reason.
func Drops(dp *loader.Datapath) ([]Drop, error) {
	list, err := collect(dp.Drops, func(key bpf.DropKey, value bpf.DropCount) Drop {
		return Drop{loader.Owner(key.Owner), DropCount{Reason(key.Reason), value.Packets, value.Bytes}}
	})
	slices.SortFunc(list, func(a, b Drop) int {
		return cmp.Or(cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Reason, b.Reason))
	})
	return list, err
}
