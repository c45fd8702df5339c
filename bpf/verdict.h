/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The verdicts of a program, and the counters of drops. */
#pragma once

#include "drop_event.h"
#include "packet.h"

/*
 * Pass the packet on: to the next program on the hook, then to the stack. The
 * value is both TCX_NEXT and TC_ACT_UNSPEC, so one program serves tcx and clsact,
 * and other tools' programs after ours see every packet.
 */
#define VERDICT_NEXT -1

/* Returned by a step instead of a verdict: the packet is for another step. */
#define NOT_HANDLED -2

/* TC_ACT_SHOT: the packet ends here. */
#define VERDICT_DROP 2

/* Returned by checks instead of an enum reason: no reason to drop. */
#define REASON_NONE -1

/* Reports a drop to the reader. A global function: the verifier checks it once. */
__noinline int drop_report(struct __sk_buff *skb, __u64 owner, __u32 reason)
{
	struct drop_reader *reader = drop_reader_get();
	struct packet *p = pkt_scratch_get();
	__u64 now = bpf_ktime_get_ns();
	struct drop_event *event;
	__u32 len = skb->len;

	if (!reader || !p || !drop_reader_lives(reader, now))
		return 0;
	drop_mark_ours(now);
	if (!(reader->reasons >> (reason & 63) & 1) ||
	    !drop_reader_wants(reader, owner, &p->src, &p->dst))
		return 0;
	event = drop_event_new(reader, reason, now);
	if (!event)
		return 0;
	event->owner = owner;
	event->location = 0;
	event->reason = reason;
	event->ifindex = skb->ifindex;
	event->ingress_ifindex = skb->ingress_ifindex;
	event->len = len;
	event->l3 = p->l3;
	event->protocol = skb->protocol;
	event->by_stack = 0;
	if (len > DROP_BYTES)
		len = DROP_BYTES;
	len = ((len - 1) & (DROP_BYTES - 1)) + 1; /* no change, but 5.10 gets the bounds */
	event->captured = bpf_skb_load_bytes(skb, 0, event->bytes, len) ? 0 : len;
	bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
	return 0;
}

/* Ends a copy or a queued fragment, which is no loss. */
static __always_inline int end_uncounted(void)
{
	struct drop_reader *reader = drop_reader_get();

	if (reader && reader->until)
		drop_mark_ours(bpf_ktime_get_ns());
	return VERDICT_DROP;
}

/* Every lost packet is dropped and counted here. */
static __always_inline int drop_counted(struct __sk_buff *skb, __u64 owner, enum reason reason)
{
	__u32 key = reason;
	struct drop_count *count = bpf_map_lookup_elem(&drop_totals, &key);
	struct drop_reader *reader = drop_reader_get();

	if (count) {
		count->packets++;
		count->bytes += skb->len;
	}
	if (reader && reader->until)
		drop_report(skb, owner, reason);
	return VERDICT_DROP;
}

/* Drops the packet, and counts it for the host. */
static __noinline int drop(struct __sk_buff *skb, enum reason reason)
{
	return drop_counted(skb, OWNER_HOST, reason);
}

/*
 * Drops the packet, and counts it for one attachment. All CPUs share the counter, because
 * drops are rare.
 */
static __noinline int drop_for(struct __sk_buff *skb, __u64 owner, enum reason reason)
{
	struct drop_key key = {.owner = owner, .reason = reason};
	struct drop_count *count = bpf_map_lookup_elem(&drops, &key);
	struct drop_count zero = {};

	if (!count) {
		bpf_map_update_elem(&drops, &key, &zero, BPF_NOEXIST);
		count = bpf_map_lookup_elem(&drops, &key);
	}
	if (count) {
		__sync_fetch_and_add(&count->packets, 1);
		__sync_fetch_and_add(&count->bytes, skb->len);
	}
	return drop_counted(skb, owner, reason);
}
