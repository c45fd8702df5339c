/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The verdicts of a program, and the counters of drops. */
#pragma once

#include "maps.h"

/*
 * Pass the packet on: to the next program on the hook, then to the stack. The
 * value is both TCX_NEXT and TC_ACT_UNSPEC, so one program serves tcx and clsact,
 * and other tools' programs after ours see every packet.
 */
#define VERDICT_NEXT -1

/* Returned by a step in the place of a verdict: the packet is for another one. */
#define NOT_HANDLED -2

/* TC_ACT_SHOT: the packet ends here. */
#define VERDICT_DROP 2

/* Returned by checks in the place of an enum reason: no reason to drop. */
#define REASON_NONE -1

/* Every lost packet is dropped and counted here. Copies and queued fragments end uncounted. */
static __noinline int drop(struct __sk_buff *skb, enum reason reason)
{
	__u32 key = reason;
	struct drop_count *count = bpf_map_lookup_elem(&drop_totals, &key);

	if (count) {
		count->packets++;
		count->bytes += skb->len;
	}
	return VERDICT_DROP;
}

/* Also counts for one attachment. All CPUs share a counter: such drops are few, or unwanted. */
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
	return drop(skb, reason);
}
