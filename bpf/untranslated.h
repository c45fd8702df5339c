/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Packets between a container and a container of another node keep their addresses and ports,
 * unless the container's port is behind a host port. The entry by which from_container leaves such
 * a connection to the stack records that, so that to_uplink need not decide again.
 */
#pragma once

#include "fib.h"
#include "fwd_stack.h"

/*
 * Records that p, which the stack has forwarded to another node, and its connection's next
 * packets keep their source.
 */
static __always_inline void untranslated_record(struct __sk_buff *skb, struct packet *p)
{
	struct fwd_entry *entry = fwd_cacheable(p) ? fwd_cache_lookup_sent(skb, p) : NULL;

	if (entry && !fwd_entry_bypasses(entry))
		entry->flags |= FWD_KEEPS_SOURCE;
}

/*
 * Reports whether p keeps its source, because its connection's last packet on this CPU did a
 * moment ago.
 */
static __noinline bool untranslated_lately(struct __sk_buff *skb, struct packet *p, __u32 tag)
{
	struct fwd_entry *entry;

	if (tag & TAG_OBSERVE || !tag_is_of(tag, p->id) || !fwd_cacheable(p))
		return false;
	entry = fwd_cache_lookup_sent(skb, p);
	if (!entry || fwd_entry_bypasses(entry) || !(entry->flags & FWD_KEEPS_SOURCE) ||
	    !fwd_entry_is_current(entry))
		return false;
	tuple_hint_delivery(p, fib_hop_of_frame(skb), false);
	return true;
}
