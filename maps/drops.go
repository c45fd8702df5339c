package maps

import (
	"cmp"
	"slices"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Drop counts the packets of one attachment that were dropped for one reason.
type Drop struct {
	Owner loader.Owner
	DropCount
}

// Drops lists the counters of all attachments, sorted by owner and reason.
func Drops(dp *loader.Datapath) ([]Drop, error) {
	var list []Drop
	for entry, err := range entries[bpf.DropKey, bpf.DropCount](dp.Drops) {
		if err != nil {
			return nil, err
		}
		list = append(list, Drop{
			loader.Owner(entry.key.Owner),
			DropCount{Reason(entry.key.Reason), entry.value.Packets, entry.value.Bytes},
		})
	}
	slices.SortFunc(list, func(a, b Drop) int {
		return cmp.Or(cmp.Compare(a.Owner, b.Owner), cmp.Compare(a.Reason, b.Reason))
	})
	return list, nil
}
