package maps

import (
	"fmt"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// DropCount counts the packets dropped for one reason, since the datapath was loaded.
type DropCount struct {
	Reason  Reason
	Packets uint64
	Bytes   uint64
}

// Reason is why a packet was dropped.
type Reason bpf.Reason

// reasons says in words what each number of enum reason in bpf/abi.h means.
var reasons = [bpf.ReasonMax]string{
	bpf.ReasonNoSource:   "the uplink has no address to masquerade with",
	bpf.ReasonNoPort:     "no port is left to masquerade with",
	bpf.ReasonFragment:   "a fragment cannot be masqueraded",
	bpf.ReasonProtocol:   "the protocol cannot be masqueraded",
	bpf.ReasonTruncated:  "the packet is shorter than its headers say",
	bpf.ReasonNoFlow:     "the translated connection is not known any more",
	bpf.ReasonRewrite:    "the kernel did not let the packet be changed",
	bpf.ReasonMAC:        "sent from another MAC address than the container's",
	bpf.ReasonAddress:    "sent from another address than the container's",
	bpf.ReasonGateway:    "sent from the gateway's address",
	bpf.ReasonARP:        "ARP for another address than the container's",
	bpf.ReasonNeighbor:   "neighbour discovery for another address than the container's",
	bpf.ReasonRouter:     "a router's advertisement or redirect from a container",
	bpf.ReasonDHCPServer: "a DHCP server's answer from a container",
	bpf.ReasonHeaders:    "headers that hide what a container sends",
	bpf.ReasonPolicy:     "ingressPolicy keeps another container out",
	bpf.ReasonSrcRange:   "the host port is not for this client",
}

// String says the reason in words.
func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r]
	}
	return fmt.Sprintf("reason %d", uint32(r))
}

// DropTotals returns the counter of every reason, in the order of their numbers.
func DropTotals(dp *loader.Datapath) ([]DropCount, error) {
	var list []DropCount
	for reason := range bpf.ReasonMax {
		var perCPU []bpf.DropCount
		if err := dp.DropTotals.Lookup(uint32(reason), &perCPU); err != nil {
			return nil, fmt.Errorf("read counter %d: %w", reason, err)
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
