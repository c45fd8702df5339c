package loader

import (
	"fmt"
	"io"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// StackDrops configures the program that reports drops of the host's stack to the reader of drop_events:
// stack_config of bpf/stack_drops.c. The first three are offsets in the tracepoint's record.
type StackDrops struct {
	Packet   uint32
	Location uint32
	Reason   uint32 // 0: the kernel gives none
	Wanted   uint32 // the only reason to report, or AnyReason
	Netns    uint32 // inode number of the network namespace
}

// AnyReason is a number that is not a reason of the kernel.
const AnyReason = ^uint32(0)

// AttachStackDrops loads the program on the datapath's maps, and runs it until it is closed. It needs the
// kernel's types (BTF). Nothing is pinned, so it also ends with the process.
func (d *Datapath) AttachStackDrops(config StackDrops) (io.Closer, error) {
	spec, err := bpf.LoadStackDrops()
	if err != nil {
		return nil, err
	}
	shared := map[string]*ebpf.Map{
		bpf.MapDevices: d.Devices, bpf.MapEndpoints: d.Endpoints, bpf.MapUplinks: d.Uplinks,
		bpf.MapDropReader: d.DropReader, bpf.MapDropLimits: d.DropLimits, bpf.MapDropEvents: d.DropEvents,
	}
	for name := range spec.Maps {
		if shared[name] == nil && name != rodata {
			delete(spec.Maps, name) // the headers define all of the datapath's
		}
	}
	if err := spec.Variables[bpf.VarStackConfig].Set(config); err != nil {
		return nil, fmt.Errorf("configure the program for drops of the stack: %w", err)
	}
	raiseMemlock()
	collection, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared})
	if err != nil {
		return nil, fmt.Errorf("load the program for drops of the stack: %w", err)
	}
	defer collection.Close()
	attached, err := link.Tracepoint("skb", "kfree_skb", collection.Programs[bpf.ProgStackDrop], nil)
	if err != nil {
		return nil, fmt.Errorf("attach to the tracepoint skb/kfree_skb: %w", err)
	}
	return attached, nil
}
