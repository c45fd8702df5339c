package drops

import (
	"cmp"
	"slices"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/nodestate"
)

// Counter counts the packets of one attachment that our programs have dropped for one reason.
type Counter struct {
	admin.Named        // empty: of no connected container
	Device      string `json:"device"`
	Count
	Policies []string `json:"policies,omitempty"` // NetworkPolicies that isolate the container in the direction of the reason, now
}

// Count counts packets that our programs have dropped for one reason.
type Count struct {
	Reason  string `json:"reason"`
	Meaning string `json:"meaning"`
	Packets uint64 `json:"packets"`
	Bytes   uint64 `json:"bytes"`
}

// Counters lists the counters of attachments, the largest first. With all, it also lists those of no connected
// container.
func Counters(datapath *loader.Datapath, attachments []*admin.Attachment, all bool) ([]Counter, error) {
	drops, err := maps.Drops(datapath) // before the totals, which then have no fewer
	if err != nil {
		return nil, err
	}
	totals, err := maps.DropTotals(datapath)
	if err != nil {
		return nil, err
	}
	byOwner, rules := admin.ByOwner(attachments), admin.NewExplainer(datapath, nil, nodestate.Default)
	list := []Counter{}
	for _, d := range drops {
		a := byOwner[d.Owner.String()]
		if a == nil || d.Packets == 0 {
			continue
		}
		policies, err := isolating(rules, a, d.Reason)
		if err != nil {
			return nil, err
		}
		list = append(list, Counter{a.Named, a.Device, CountOf(d.DropCount), policies})
		if i := int(d.Reason); i < len(totals) {
			totals[i].Packets, totals[i].Bytes = totals[i].Packets-d.Packets, totals[i].Bytes-d.Bytes
		}
	}
	for _, rest := range totals {
		if all && rest.Packets > 0 {
			list = append(list, Counter{Count: CountOf(rest)})
		}
	}
	slices.SortStableFunc(list, func(a, b Counter) int { return cmp.Compare(b.Packets, a.Packets) })
	return list, nil
}

// isolating returns the NetworkPolicies that isolate a container in the direction of a reason, if there is one.
func isolating(rules *admin.Explainer, a *admin.Attachment, reason maps.Reason) ([]string, error) {
	isEgress := bpf.Reason(reason) == bpf.ReasonPolicyEgress
	if !isEgress && bpf.Reason(reason) != bpf.ReasonPolicyIngress {
		return nil, nil
	}
	return rules.Isolating(a, isEgress)
}

// CountOf returns a count with the words for its reason.
func CountOf(count maps.DropCount) Count {
	return Count{Reason: count.Reason.Name(), Meaning: count.Reason.String(), Packets: count.Packets, Bytes: count.Bytes}
}
