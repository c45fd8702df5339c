package maps

import (
	"fmt"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Offload is a connection of an endpoint that the host's stack has forwarded. The
// programs write them; user space only reads. They end with their endpoints.
type Offload struct {
	Sides    [2]netip.AddrPort
	Protocol Protocol
	// Past says that packets of it go past the stack, as far as they are not too old.
	Past bool
}

// String is for people.
func (o Offload) String() string {
	way := "goes through the stack"
	if o.Past {
		way = "goes past the stack"
	}
	return fmt.Sprintf("%s between %s and %s %s", o.Protocol, o.Sides[0], o.Sides[1], way)
}

// Offloads lists all, in no order. Their number can be large.
func Offloads(dp *loader.Datapath) ([]Offload, error) {
	var list []Offload
	for _, m := range []*ebpf.Map{dp.OffloadTCP, dp.OffloadUDP} {
		for entry, err := range entries[bpf.DatapathOffloadKey, bpf.DatapathOffload](m) {
			if err != nil {
				return nil, err
			}
			list = append(list, offloadOf(entry.key, entry.value))
		}
	}
	return list, nil
}

func offloadOf(key bpf.DatapathOffloadKey, value bpf.DatapathOffload) Offload {
	const both = 3 * bpf.DatapathOffloadStateOFFLOAD_DELIVERED // of both sides

	o := Offload{Protocol: Protocol(key.Protocol), Past: value.State&both == both}
	for i := range o.Sides {
		o.Sides[i] = netip.AddrPortFrom(addrOf(key.Addr[i]), key.Port[i])
	}
	return o
}
