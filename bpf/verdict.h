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

/* The only way to drop a packet: each has its reason, and is counted. */
static __noinline int drop(struct __sk_buff *skb, enum reason reason)
{
	__u32 key = reason;
	struct counter *counter = bpf_map_lookup_elem(&counters, &key);

	if (counter) {
		counter->packets++;
		counter->bytes += skb->len;
	}
	return VERDICT_DROP;
}
