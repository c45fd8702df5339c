package maps

import (
	"fmt"

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

// reasons describes the numbers of enum reason in bpf/abi.h.
var reasons = [bpf.ReasonMax]string{
	bpf.ReasonNoSource:   "uplink has no address to masquerade with",
	bpf.ReasonNoPort:     "no masquerading port left",
	bpf.ReasonFragment:   "fragment cannot be masqueraded",
	bpf.ReasonProtocol:   "protocol cannot be masqueraded",
	bpf.ReasonTruncated:  "packet shorter than its headers claim",
	bpf.ReasonRewrite:    "kernel refused to rewrite the packet",
	bpf.ReasonNoFlow:     "flow of a translated connection is lost",
	bpf.ReasonMAC:        "source MAC address is not the container's",
	bpf.ReasonAddress:    "source address is not the container's",
	bpf.ReasonGateway:    "source address is the gateway's",
	bpf.ReasonARP:        "ARP for an address that is not the container's",
	bpf.ReasonNeighbor:   "neighbor discovery for an address that is not the container's",
	bpf.ReasonRouter:     "router advertisement or redirect from a container",
	bpf.ReasonDHCPServer: "DHCP server message from a container",
	bpf.ReasonHeaders:    "IPv6 headers that hide the payload",
	bpf.ReasonPolicy:     "sender denied by ingressPolicy",
	bpf.ReasonSrcRange:   "client outside the host port's portSources",
	bpf.ReasonICMPError:  "ICMP error about another's connection",
	bpf.ReasonNextHop:    "gateway of the container's route is not here",
	bpf.ReasonTunnel:     "packet for a tunnel of the host",
	bpf.ReasonBridge:     "message for bridges from a container",
}

// String describes the reason.
func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r]
	}
	return fmt.Sprintf("reason %d", uint32(r))
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
