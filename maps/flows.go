package maps

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Flow is a connection that the programs remember in order to translate its packets or
// to accept its replies. Only the programs create flows; user space reads and removes them.
type Flow struct {
	// Kind is bpf.FlowSNAT: opened by a container and masqueraded; bpf.FlowDNAT: opened
	// to a container; or bpf.FlowEgress: opened by a container with an ingress policy.
	Kind bpf.FlowKind
	// Remote is the other side. The port is 0 for echo requests to it.
	Remote netip.AddrPort
	// Local is the masquerading address and port for SNAT, else the container's.
	Local netip.AddrPort
	// NAT is the container's address and port for SNAT, the original destination for
	// DNAT, and unused for Egress.
	NAT      netip.AddrPort
	Protocol Protocol
	Owner    loader.Owner
}

// String describes the flow for an operator, from the side that opened it.
func (f Flow) String() string {
	remote, local, nat := text(f.Remote), text(f.Local), text(f.NAT)
	switch {
	case f.Kind == bpf.FlowSNAT:
		return fmt.Sprintf("%s %s to %s, SNAT to %s", f.Protocol, nat, remote, local)
	case f.Kind == bpf.FlowEgress:
		return fmt.Sprintf("%s %s to %s, replies allowed", f.Protocol, local, remote)
	case f.Local == f.NAT:
		return fmt.Sprintf("%s %s to %s, no DNAT", f.Protocol, remote, local)
	default:
		return fmt.Sprintf("%s %s to %s, DNAT to %s", f.Protocol, remote, nat, local)
	}
}

// text omits the port that an echo request does not have.
func text(p netip.AddrPort) string {
	if p.Port() == 0 {
		return p.Addr().String()
	}
	return p.String()
}

// Flows lists all flows, in no particular order. There can be hundreds of thousands.
func Flows(dp *loader.Datapath) ([]Flow, error) { return flowsIn(dp.Flows) }

// FlowsBackup lists the flows of flows_backup, in no particular order.
func FlowsBackup(dp *loader.Datapath) ([]Flow, error) { return flowsIn(dp.FlowsBackup) }

func flowsIn(m *ebpf.Map) ([]Flow, error) {
	var list []Flow
	for entry, err := range entries[bpf.FlowKey, bpf.Flow](m) {
		if err != nil {
			return nil, err
		}
		list = append(list, flowOf(entry.key, entry.value))
	}
	return list, nil
}

func flowOf(key bpf.FlowKey, value bpf.Flow) Flow {
	return Flow{
		Kind:     key.Kind,
		Remote:   netip.AddrPortFrom(addrOf(key.Remote), key.RemotePort),
		Local:    netip.AddrPortFrom(addrOf(key.Local), key.LocalPort),
		NAT:      netip.AddrPortFrom(addrOf(value.NatAddr), value.NatPort),
		Protocol: Protocol(key.Protocol),
		Owner:    loader.Owner(value.Owner),
	}
}
