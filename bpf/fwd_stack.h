/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Entries of packets that go through the stack: they are counted, because short connections are not
 * offloaded, and have what the last hook did.
 */
#pragma once

#include "flow_table.h"
#include "fwd_entry.h"
#include "tuple_hint.h"

/* Another CPU may offload the connection meanwhile. 4 at 250 Hz and more. */
#define FWD_NEW_JIFFIES (config.cache_jiffies / 12)

/*
 * Reports whether the connection is so new that no CPU can have offloaded it: that begins an epoch of the tuple that the last hook sees.
 */
static __always_inline bool fwd_entry_is_new(const struct fwd_entry *entry, const struct packet *p)
{
	__u32 id = entry->action == FWD_FLOW ? entry->flow.id : p->id;

	return entry->flags & FWD_NEW && entry->budget &&
	       (__u32)bpf_jiffies64() - entry->updated < FWD_NEW_JIFFIES &&
	       (p->protocol != IPPROTO_TCP ||
		entry->epoch == tuple_hint_epoch(tuple_hint_load(id)));
}

/* Has the entry leave packets like p, whose tuple has the id, to the stack, if nothing but the plugin's maps can change that. */
static __always_inline void fwd_entry_repeat(struct fwd_entry *entry, const struct packet *p,
					     __u32 id)
{
	struct device *device = p->decided.known ? device_lookup(p->ifindex) : NULL;

	entry->action = FWD_COUNT;
	entry->flags &= ~FWD_COMPARE;
	entry->flow_kind = 0;
	if (!p->decided.stack_cacheable || p->decided.pending == PENDING_JUDGE ||
	    (p->decided.known && !device))
		return;
	entry->action = FWD_STACK;
	entry->ifindex = p->decided.receiver;
	if (p->decided.pending)
		entry->flags |= FWD_COMPARE;
	if (p->decided.paired)
		entry->flow_kind = FLOW_PAIR;
	entry->tag = tag_of(id) | tag_judged(p);
	entry->policies = p->decided.policies;
	entry->policy_generation = p->decided.policy_generation;
	if (!device)
		return;
	entry->flow_kind = FLOW_POLICY;
	fwd_entry_set_owner(entry, device->owner);
}

/*
 * Sets the entry for p, which goes through the stack, where its tuple has the id. The flow of a
 * remote's packet keeps its owner until the generation changes.
 */
static __always_inline void fwd_entry_to_stack(struct fwd_entry *entry, const struct packet *p,
					       __u32 id)
{
	const struct decision *decided = &p->decided;
	struct endpoint *to = decided->flow_kind ? endpoint_lookup(&decided->new_addr) : NULL;

	if (!to || to->route_set) {
		fwd_entry_repeat(entry, p, id);
		return;
	}
	entry->action = FWD_FLOW;
	entry->tag = tag_of(id) | tag_judged(p);
	fwd_entry_set_owner(entry, to->owner);
	entry->flow.id = id;
	entry->flow_kind = decided->flow_kind;
	entry->nat_addr = decided->new_addr;
	entry->nat_port = decided->new_port;
}

/*
 * Counts p, which goes through the stack, where its tuple has the id. Reports whether the last hook has to
 * record its delivery: not for the connection's first budget packets.
 */
static __always_inline bool fwd_cache_count(struct __sk_buff *skb, const struct packet *p, __u32 id,
					    __u32 budget)
{
	bool opens = p->tcp_syn || p->tcp_synack;
	struct fwd_entry *entry;
	__u8 flags = 0;

	if (p->decided.first)
		return false;
	entry = opens ? NULL : fwd_cache_find(p);
	asm volatile("" : "+r"(entry)); /* or Linux 5.10 does not follow the comparison */
	if (entry) {
		if (fwd_entry_bypasses(entry)) /* it has before */
			return true;
		budget = entry->budget;
		if (budget && budget != FWD_NO_LIMIT)
			entry->budget = --budget;
		if (fwd_entry_is_current(entry)) {
			if (entry->action == FWD_COUNT)
				fwd_entry_repeat(entry, p, id);
			return !budget;
		}
	} else if (opens || p->protocol == IPPROTO_UDP) {
		flags = FWD_NEW;
	}
	entry = fwd_cache_store(skb, p);
	if (!entry)
		return true;
	fwd_entry_to_stack(entry, p, id);
	entry->budget = budget;
	entry->flags |= flags;
	entry->epoch = tuple_hint_epoch(tuple_hint_load(id));
	return !budget;
}

/* Reports whether p's connection is new, and not offloaded. */
static __noinline bool fwd_cache_is_new(const struct packet *p)
{
	struct fwd_entry *entry;

	if (p->tcp_syn || p->tcp_synack || p->decided.first)
		return true;
	entry = fwd_cache_find(p);
	return entry && !fwd_entry_bypasses(entry) && fwd_entry_is_new(entry, p) &&
	       fwd_entry_is_current(entry);
}

/* Returns the entry of from_container for p, which to_uplink sends; or NULL. */
static __always_inline struct fwd_entry *fwd_cache_lookup_sent(struct __sk_buff *skb,
							       struct packet *p)
{
	struct fwd_entry *entry;

	p->ifindex = skb->ingress_ifindex;
	entry = fwd_cache_find(p);
	p->ifindex = skb->ifindex;
	return entry;
}

/*
 * Tags p, which goes through the stack, so that the last hook creates the flow of p, if p goes to a container and has none
 * (forward_track_pending), or obeys enum pending. receiver as in struct routed.
 */
static __always_inline void fwd_tag_pending(struct __sk_buff *skb, const struct packet *p,
					    __u8 pending, __u32 receiver)
{
	__u32 tag = skb->tc_index | TAG_PENDING, key = tag % ROUTED_TUPLES;
	struct routed *entry = bpf_map_lookup_elem(&routed, &key);

	if (!entry)
		return;
	entry->tuple = *packet_tuple(p);
	entry->id = pending == PENDING_COMPARE ? p->id : p->id & ~1u;
	entry->receiver = receiver;
	skb->tc_index = tag;
}

/* Stores p's new source for the connection's next packets. flow_scratch has its flow, if it has one. */
static __always_inline void fwd_entry_set_source(struct fwd_entry *entry, const struct packet *p)
{
	struct flow_args *args = flow_scratch_get();

	fwd_entry_translate(entry, SIDE_SRC, &p->decided.new_addr, p->decided.new_port);
	entry->flags &= ~FWD_REPLY;
	if (p->decided.flow_kind == FLOW_DNAT)
		entry->flags |= FWD_REPLY;
	if (args)
		entry->flow_place = flow_place_of(args);
}

/* The same for p, which the stack has forwarded. */
static __noinline void fwd_cache_record_source(struct __sk_buff *skb, struct packet *p)
{
	struct fwd_entry *entry = fwd_cache_lookup_sent(skb, p);

	if (entry && !fwd_entry_bypasses(entry))
		fwd_entry_set_source(entry, p);
}

/* Reports whether this CPU has sent or redirected a packet with the tuple in pkt_scratch. */
__noinline int fwd_knows_tuple(void)
{
	struct packet *p = pkt_scratch_get();
	struct fwd_ways *ways;
	__u32 id, bucket;

	if (!p)
		return false;
	id = p->id;
	bucket = fwd_bucket_of(id);
	ways = bpf_map_lookup_elem(&fwd_ways, &bucket);
	return ways && (ways->to_stack == id || ways->id[0] == id || ways->id[1] == id);
}
