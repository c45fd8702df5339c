/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What can become of a packet. */
#pragma once

#include "maps.h"

/*
 * The packet goes on: to the next program on the hook, then to the stack. The
 * number is TCX_NEXT as well as TC_ACT_UNSPEC, so that one program serves tcx
 * and clsact, and other tools' programs after ours see every packet.
 */
#define VERDICT_NEXT -1

/* The packet ends here (TC_ACT_SHOT). */
#define VERDICT_DROP 2

/* The only way to lose a packet: each has its reason, and is counted. A copy just ends. */
static __noinline int drop(struct __sk_buff *skb, enum reason reason)
{
	__u32 key = reason;
	struct drop_count *counter = bpf_map_lookup_elem(&drop_totals, &key);

	if (counter) {
		counter->packets++;
		counter->bytes += skb->len;
	}
	return VERDICT_DROP;
}

/* The same of what a container sends, or is sent. One counter for all CPUs: drops are few, or unwanted. */
static __noinline int drop_for(struct __sk_buff *skb, __u64 owner, enum reason reason)
{
	struct drop_key key = {.owner = owner, .reason = reason};
	struct drop_count *counter = bpf_map_lookup_elem(&drops, &key);
	struct drop_count none = {};

	if (!counter) {
		bpf_map_update_elem(&drops, &key, &none, BPF_NOEXIST);
		counter = bpf_map_lookup_elem(&drops, &key);
	}
	if (counter) {
		__sync_fetch_and_add(&counter->packets, 1);
		__sync_fetch_and_add(&counter->bytes, skb->len);
	}
	return drop(skb, reason);
}
