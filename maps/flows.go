package maps

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Flow is a translated connection. The programs write them; user space only
// reads and removes.
type Flow struct {
	// Out: opened by a container and masqueraded.
	Out bool
	// Opened by a container with an ingress policy. Neither: opened towards it.
	Opened bool
	// Remote is the other side. The port is 0 for echo requests to it.
	Remote netip.AddrPort
	// Local is the masquerading address and port for Out, else the container's.
	Local netip.AddrPort
	// Translated is the container's address and port for Out, else those the remote uses;
	// of no meaning for Opened.
	Translated netip.AddrPort
	Protocol   Protocol
	Owner      loader.Owner
}

// String is for people.
func (f Flow) String() string {
	remote, local, translated := place(f.Remote), place(f.Local), place(f.Translated)
	switch {
	case f.Out:
		return fmt.Sprintf("%s %s to %s leaves as %s", f.Protocol, translated, remote, local)
	case f.Opened:
		return fmt.Sprintf("%s %s to %s may be answered", f.Protocol, local, remote)
	case f.Local == f.Translated:
		return fmt.Sprintf("%s %s from %s keeps its address", f.Protocol, local, remote)
	default:
		return fmt.Sprintf("%s %s from %s answers as %s", f.Protocol, local, remote, translated)
	}
}

// place leaves out the port that echo messages do not have.
func place(p netip.AddrPort) string {
	if p.Port() == 0 {
		return p.Addr().String()
	}
	return p.String()
}

// Flows lists all flows, in no order. Their number can be large.
func Flows(dp *loader.Datapath) ([]Flow, error) { return flowsIn(dp.Flows) }

// FlowsBackup lists the flows of flows_backup, in no order.
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
		Out:        key.Kind == bpf.FlowSNAT,
		Opened:     key.Kind == bpf.FlowEgress,
		Remote:     netip.AddrPortFrom(addrOf(key.Remote), key.RemotePort),
		Local:      netip.AddrPortFrom(addrOf(key.Local), key.LocalPort),
		Translated: netip.AddrPortFrom(addrOf(value.NatAddr), value.NatPort),
		Protocol:   Protocol(key.Protocol),
		Owner:      loader.Owner(value.Owner),
	}
}
