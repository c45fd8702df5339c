/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What a container and one of another node send each other keeps its addresses and ports, unless
 * the container's port is behind a host port. The stack's next packets of such a connection are
 * known by the entry by which from_container leaves them to it.
 */
#pragma once

#include "fwd_cache.h"
#include "node.h"

/* p, which the stack has forwarded to another node, keeps its source. So do the connection's next packets. */
static __always_inline void untranslated_note(struct __sk_buff *skb, struct packet *p)
{
	struct fwd_entry *entry = fwd_cacheable(p) ? fwd_cache_lookup_sent(skb, p) : NULL;

	if (entry && !entry->ifindex)
		entry->flags |= FWD_NODE;
}

/* The last packet of p's connection did so a moment ago and on this CPU, and p is to be noted nowhere. */
static __noinline bool untranslated_lately(struct __sk_buff *skb, struct packet *p, __u32 tag)
{
	struct fwd_entry *entry;

	if (tag & TAG_OBSERVE || !tag_matches(tag, p) || !fwd_cacheable(p))
		return false;
	entry = fwd_cache_lookup_sent(skb, p);
	if (!entry || entry->ifindex || !(entry->flags & FWD_NODE) || !fwd_entry_is_current(entry))
		return false;
	tuple_note_delivery(p, fib_hop_of_frame(skb));
	return true;
}
