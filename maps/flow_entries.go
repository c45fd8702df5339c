package maps

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"
	"unsafe"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// tick is the unit of time in maps: bpf/packet.h.
const tick = 1 << 30 * time.Nanosecond

// FlowEntry is an entry of flow_table, with its times.
type FlowEntry struct {
	Flow
	Age     time.Duration // since it was opened, modulo 2^16 ticks (19 hours)
	Idle    time.Duration // since its last packet; those of the forwarding cache are recorded once per second
	Replied bool          // both sides have sent
	Expired bool          // idle for longer than its state allows, so another flow may replace it
	CT      uint64        // bpf.FlowCTNAT: as in OffloadEntry
}

// FlowEntries lists all flows with their times, in no particular order.
func FlowEntries(dp *loader.Datapath) ([]FlowEntry, error) {
	now, err := nowTicks()
	if err != nil {
		return nil, err
	}
	var list []FlowEntry
	for entry, err := range flowEntries(dp, isNotOffload) {
		if err != nil {
			return nil, err
		}
		list = append(list, flowEntryOf(dp, entry.Key, entry.Flow, now))
	}
	return list, nil
}

// CountFlows counts the flows of each state that have not expired.
func CountFlows(dp *loader.Datapath) (map[FlowState]int, error) {
	now, err := nowTicks()
	if err != nil {
		return nil, err
	}
	counts := map[FlowState]int{}
	for entry, err := range flowEntries(dp, isNotOffload) {
		if err != nil {
			return nil, err
		}
		if f := flowEntryOf(dp, entry.Key, entry.Flow, now); !f.Expired {
			counts[f.State]++
		}
	}
	return counts, nil
}

// FlowTableUse returns the share of the places in flow_table whose flows no other flow may replace. It samples 64 buckets, so its
// cost does not depend on the number of flows. 0 if the table is not open.
func FlowTableUse(dp *loader.Datapath) (share float64, err error) {
	const most = 64 // buckets

	if dp.FlowTable == nil {
		return 0, nil
	}
	now, errNow := nowTicks()
	living, errLiving := livingOwners(dp)
	if err := errors.Join(errNow, errLiving); err != nil {
		return 0, err
	}
	all := dp.FlowBuckets.MaxEntries()
	read, used := min(all, most), 0
	for i := range read {
		places, err := bucketOf(dp, uint32(uint64(i)*uint64(all)/uint64(read)))
		if err != nil {
			return 0, err
		}
		for _, place := range places {
			if isAssured(place.Flow) && !isExpired(dp, place.Flow, now) && living[loader.Owner(place.Flow.Owner)] {
				used++
			}
		}
	}
	return float64(used) / float64(int(read)*len(bpf.FlowBucket{}.Id)), nil
}

// bucketOf returns the places of a bucket of flow_table. Free ones are empty.
func bucketOf(dp *loader.Datapath, number uint32) (places [len(bpf.FlowBucket{}.Id)]bpf.FlowEntry, err error) {
	var bucket bpf.FlowBucket
	err = dp.FlowBuckets.Lookup(number, &bucket)
	for way := range places {
		err = errors.Join(err, dp.FlowTable.Lookup(number*uint32(len(places))+uint32(way), &places[way]))
		if bucket.Id[way] == 0 {
			places[way] = bpf.FlowEntry{}
		}
	}
	if err != nil {
		return places, fmt.Errorf("read bucket %d of the flows: %w", number, err)
	}
	return places, nil
}

// isAssured reports whether no other flow may replace the flow until it expires: flow_is_assured in bpf/flow_state.h.
func isAssured(flow bpf.Flow) bool {
	return flow.State >= bpf.FlowEstablished && flow.State <= bpf.FlowCloseWait || flow.State == bpf.FlowUDPStream
}

// isExpired reports whether the flow has been idle for longer than its state allows.
func isExpired(dp *loader.Datapath, flow bpf.Flow, now uint32) bool {
	return flow.State >= bpf.FlowStates || sinceTick(now, flow.LastSeen) > time.Duration(dp.Config.Timeout[flow.State])*tick
}

func flowEntryOf(dp *loader.Datapath, key bpf.FlowKey, value bpf.Flow, now uint32) FlowEntry {
	idle := sinceTick(now, value.LastSeen)
	if idle == 0 {
		now = value.LastSeen // which may be later
	}
	e := FlowEntry{
		Flow:    flowOf(key, value),
		Age:     max(time.Duration(uint16(now)-value.Created)*tick, idle),
		Idle:    idle,
		Replied: value.Flags&bpf.FlowReplied != 0,
		Expired: isExpired(dp, value, now),
	}
	if key.Kind == bpf.FlowCTNAT {
		e.CT, e.Replied = (*bpf.CtNAT)(unsafe.Pointer(&value)).Ct, true
	}
	return e
}

// sinceTick returns the time since then, or 0 if then is later than now.
func sinceTick(now, then uint32) time.Duration { return time.Duration(max(int32(now-then), 0)) * tick }

// OffloadEntry is a connection that bypasses the stack, or is about to.
type OffloadEntry struct {
	Protocol  Protocol
	Sides     [2]netip.AddrPort // the one with the lower port first
	State     string            // "one way", "open", "closing" or "closed"
	FlowState FlowState         // since the stack has delivered both sides: ESTABLISHED or UDP_STREAM, or TIME_WAIT if it has ended
	Seen      time.Duration     // since conntrack last saw it
	Expired   bool              // as in FlowEntry
	CT        uint64            // identifies it if the host's rules translate it, else 0; then Sides are those after translation
}

// OffloadEntries lists the connections that bypass the stack, or are about to, in no particular order.
func OffloadEntries(dp *loader.Datapath) ([]OffloadEntry, error) {
	now, err := nowTicks()
	if err != nil {
		return nil, err
	}
	var list []OffloadEntry
	for entry, err := range flowEntries(dp, isOffload) {
		if err != nil {
			return nil, err
		}
		e := offloadEntryOf(entry.Key, offloadOf(entry.Flow), now)
		e.Expired = isExpired(dp, entry.Flow, now)
		list = append(list, e)
	}
	return list, nil
}

// offloadOf returns a flow of kind FlowOffload: the two share their memory.
func offloadOf(flow bpf.Flow) bpf.Offload { return *(*bpf.Offload)(unsafe.Pointer(&flow)) }

func offloadEntryOf(key bpf.FlowKey, value bpf.Offload, now uint32) OffloadEntry {
	e := OffloadEntry{
		Protocol: Protocol(key.Protocol), State: "one way", FlowState: FlowState(value.FlowState), Seen: sinceTick(now, value.CtSeen),
		Sides: [2]netip.AddrPort{
			netip.AddrPortFrom(addrOf(key.Remote), key.RemotePort), netip.AddrPortFrom(addrOf(key.Local), key.LocalPort),
		},
	}
	if value.Translated != 0 {
		e.CT = value.Ct
	}
	both := func(bit bpf.OffloadState) bpf.OffloadState { return bit | bit<<1 }
	switch {
	case value.State&both(bpf.OffloadFINACK) == both(bpf.OffloadFINACK):
		e.State = "closed"
	case value.State&both(bpf.OffloadFIN) != 0:
		e.State = "closing"
	case value.State&both(bpf.OffloadDelivered) == both(bpf.OffloadDelivered):
		e.State = "open"
	}
	return e
}

// CacheEntry is the decision for the last packet of one direction of a connection.
type CacheEntry struct {
	Protocol Protocol
	Src, Dst netip.AddrPort
	NAT      netip.AddrPort // what the source or the destination becomes; invalid: neither changes
	NATSrc   bool           // the source
	State    string         // "bypass"; "stack": packets go through it, and are counted; or "void" after a change of the plugin's
	Idle     time.Duration  // since the decision was last made: at most 200 ms, 50 jiffies, of traffic
}

// CacheEntries lists the forwarding caches of all CPUs, in no particular order. If several CPUs have an entry for
// a direction, it returns one that bypasses the stack, or else the latest.
func CacheEntries(dp *loader.Datapath) ([]CacheEntry, error) {
	generation, err := generationOf(dp)
	if err = errors.Join(err, dp.OpenOnDemand(bpf.MapFwdCache)); err != nil || dp.FwdCache == nil {
		return nil, err
	}
	now, err := loader.ReadClock()
	if err != nil {
		return nil, err
	}
	latest := map[bpf.FwdKey]CacheEntry{}
	var ofCPUs []bpf.FwdEntry
	for place := range dp.FwdCache.MaxEntries() {
		if err := dp.FwdCache.Lookup(place, &ofCPUs); err != nil {
			return nil, fmt.Errorf("read place %d of the forwarding cache: %w", place, err)
		}
		for _, value := range ofCPUs {
			if value.Action == bpf.FwdRoute {
				continue // or empty
			}
			e := cacheEntryOf(value, generation, now)
			if other, found := latest[value.Key]; !found || e.replaces(other) {
				latest[value.Key] = e
			}
		}
	}
	return slices.Collect(maps.Values(latest)), nil
}

func cacheEntryOf(value bpf.FwdEntry, generation uint32, now loader.Clock) CacheEntry {
	key := value.Key
	e := CacheEntry{
		Protocol: Protocol(key.Protocol),
		Src:      netip.AddrPortFrom(addrOf(key.Src), key.Sport),
		Dst:      netip.AddrPortFrom(addrOf(key.Dst), key.Dport),
		State:    "bypass",
		Idle:     now.Since(value.Updated),
	}
	switch {
	case value.Generation != generation:
		e.State = "void"
	case value.Action < bpf.FwdContainer:
		e.State = "stack"
	}
	if value.Nat != bpf.FwdNATNone {
		e.NAT, e.NATSrc = netip.AddrPortFrom(addrOf(value.NatAddr), value.NatPort), value.Nat == bpf.FwdNATSrc
	}
	return e
}

// replaces reports whether e is more current than another CPU's entry for the same direction. A CPU may
// still count packets while another one has them bypass the stack.
func (e CacheEntry) replaces(other CacheEntry) bool {
	const atOnce = 200 * time.Millisecond // an entry holds for 200 ms at most

	if distance := e.Idle - other.Idle; distance.Abs() > atOnce || (e.State == "bypass") == (other.State == "bypass") {
		return distance < 0
	}
	return e.State == "bypass"
}

// generationOf returns the part of the present generation that the programs compare, or 0 without the map.
func generationOf(dp *loader.Datapath) (uint32, error) {
	if err := dp.OpenOnDemand(bpf.MapGeneration); err != nil || dp.Generation == nil {
		return 0, err
	}
	var number uint64
	if err := dp.Generation.Lookup(uint32(0), &number); err != nil {
		return 0, fmt.Errorf("read the generation: %w", err)
	}
	return uint32(number), nil
}
