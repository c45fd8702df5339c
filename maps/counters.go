package maps

import (
	"fmt"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Counter counts the packets dropped for one reason, since the datapath was loaded.
type Counter struct {
	Reason  Reason
	Packets uint64
	Bytes   uint64
}

// Reason is why a packet was dropped.
type Reason bpf.DatapathReason

// reasons says in words what each number of enum reason in bpf/abi.h means.
var reasons = [bpf.DatapathReasonREASON_MAX]string{
	bpf.DatapathReasonREASON_NO_SOURCE:   "the uplink has no address to masquerade with",
	bpf.DatapathReasonREASON_NO_PORT:     "no port is left to masquerade with",
	bpf.DatapathReasonREASON_FRAGMENT:    "a fragment cannot be masqueraded",
	bpf.DatapathReasonREASON_PROTOCOL:    "the protocol cannot be masqueraded",
	bpf.DatapathReasonREASON_TRUNCATED:   "the packet is shorter than its headers say",
	bpf.DatapathReasonREASON_NO_FLOW:     "the translated connection is not known any more",
	bpf.DatapathReasonREASON_NOT_WRITTEN: "the kernel did not let the packet be changed",
	bpf.DatapathReasonREASON_MAC:         "sent from another MAC address than the container's",
	bpf.DatapathReasonREASON_ADDRESS:     "sent from another address than the container's",
	bpf.DatapathReasonREASON_GATEWAY:     "sent from the gateway's address",
	bpf.DatapathReasonREASON_ARP:         "ARP for another address than the container's",
	bpf.DatapathReasonREASON_NEIGHBOR:    "neighbour discovery for another address than the container's",
	bpf.DatapathReasonREASON_ROUTER:      "a router's advertisement or redirect from a container",
	bpf.DatapathReasonREASON_DHCP_SERVER: "a DHCP server's answer from a container",
	bpf.DatapathReasonREASON_HEADERS:     "headers that hide what a container sends",
	bpf.DatapathReasonREASON_POLICY:      "ingressPolicy keeps another container out",
	bpf.DatapathReasonREASON_CLIENT:      "the host port is not for this client",
}

// String says the reason in words.
func (r Reason) String() string {
	if int(r) < len(reasons) {
		return reasons[r]
	}
	return fmt.Sprintf("reason %d", uint32(r))
}

// Counters returns the counter of every reason, in the order of their numbers.
func Counters(dp *loader.Datapath) ([]Counter, error) {
	var list []Counter
	for reason := range bpf.DatapathReasonREASON_MAX {
		var perCPU []bpf.DatapathCounter
		if err := dp.Counters.Lookup(uint32(reason), &perCPU); err != nil {
			return nil, fmt.Errorf("read counter %d: %w", reason, err)
		}
		sum := Counter{Reason: Reason(reason)}
		for _, c := range perCPU {
			sum.Packets += c.Packets
			sum.Bytes += c.Bytes
		}
		list = append(list, sum)
	}
	return list, nil
}
