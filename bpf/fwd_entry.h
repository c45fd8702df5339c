/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The entries of the forwarding cache (fwd_cache.h). */
#pragma once

#include "bytes.h"
#include "maps.h"
#include "packet.h"

/* Reports whether p's connection may have an entry. */
static __always_inline bool fwd_cacheable(const struct packet *p)
{
	return p->fast_eligible && p->ttl > 1 && !p->decided.remapped && !p->decided.uncached &&
	       !p->decided.first && is_tcp_or_udp(p->protocol);
}

/* Reports whether p opens or closes its connection: then only entries with FWD_EVERY_TCP apply. */
static __always_inline bool fwd_changes_state(const struct packet *p)
{
	return p->tcp_syn || p->tcp_synack || p->tcp_fin || p->tcp_rst;
}

/* Reports whether p opens a connection whose next packet updates the flow of that kind, so that p's decision can be stored. */
static __always_inline bool fwd_opens_tracked(const struct packet *p, __u32 flow_kind)
{
	return flow_kind && (p->tcp_syn || p->tcp_synack);
}

/* The present generation of the plugin's maps. */
static __always_inline __u32 generation_get(void)
{
	__u32 zero = 0;
	__u64 *number = bpf_map_lookup_elem(&generation, &zero);

	return number ? *number : 0;
}

static __always_inline bool fwd_entry_is_current(const struct fwd_entry *entry)
{
	return (__u32)bpf_jiffies64() - entry->updated < config.cache_jiffies &&
	       entry->generation == generation_get();
}

/* The keys are aligned as __u64. */
static __always_inline bool fwd_key_equal(const struct fwd_key *a, const struct fwd_key *b)
{
	const __u64 *x = (const __u64 *)a, *y = (const __u64 *)b;

	return !((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3]) | (x[4] ^ y[4]) |
		 (*(const __u32 *)&a->protocol ^ *(const __u32 *)&b->protocol));
}

/* Returns the entry of a way of the bucket. NULL only for the verifier. */
static __always_inline struct fwd_entry *fwd_entry_at(__u32 bucket, __u32 way)
{
	__u32 place = bucket * FWD_WAYS + way;

	return bpf_map_lookup_elem(&fwd_cache, &place);
}

static __always_inline __u32 fwd_bucket_of(__u32 id)
{
	return (id >> 1) % FWD_BUCKETS;
}

/* This CPU's entry with the key, which has the id; or NULL. It may be out of date. */
static __always_inline struct fwd_entry *fwd_cache_lookup(const struct fwd_key *key, __u32 id)
{
	__u32 bucket = fwd_bucket_of(id), way = 0;
	struct fwd_ways *ways = bpf_map_lookup_elem(&fwd_ways, &bucket);
	struct fwd_entry *entry;

	if (!ways)
		return NULL;
	if (ways->id[0] != id) {
		if (ways->id[1] != id)
			return NULL;
		way = 1;
	}
	entry = fwd_entry_at(bucket, way);
	if (!entry || !fwd_key_equal(&entry->key, key))
		return NULL;
	if (ways->last != way)
		ways->last = way;
	return entry;
}

/* This CPU's entry for p, or NULL. */
static __always_inline struct fwd_entry *fwd_cache_find(const struct packet *p)
{
	return fwd_cache_lookup(packet_tuple(p), p->id);
}

/* A place for the id's key: its own, or that of the way that was not used last. */
static __always_inline struct fwd_entry *fwd_cache_place(__u32 id)
{
	__u32 bucket = fwd_bucket_of(id), way;
	struct fwd_ways *ways = bpf_map_lookup_elem(&fwd_ways, &bucket);

	if (!ways)
		return NULL;
	way = !ways->last;
	if (ways->id[0] == id)
		way = 0;
	else if (ways->id[1] == id)
		way = 1;
	if (way)
		ways->id[1] = id;
	else
		ways->id[0] = id;
	ways->last = way;
	return fwd_entry_at(bucket, way);
}

/* Records that this CPU leaves a packet with the tuple of the id to the stack. */
static __always_inline void fwd_record_stack(__u32 id)
{
	__u32 bucket = fwd_bucket_of(id);
	struct fwd_ways *ways = bpf_map_lookup_elem(&fwd_ways, &bucket);

	if (ways && ways->to_stack != id)
		ways->to_stack = id;
}

/* Reports whether packets bypass the stack. */
static __always_inline bool fwd_entry_bypasses(const struct fwd_entry *entry)
{
	return entry->action >= FWD_CONTAINER;
}

static __always_inline void fwd_entry_set_owner(struct fwd_entry *entry, __u64 owner)
{
	entry->flow.owner[0] = owner;
	entry->flow.owner[1] = owner >> 32;
}

static __always_inline __u64 fwd_entry_owner(const struct fwd_entry *entry)
{
	return (__u64)entry->flow.owner[1] << 32 | entry->flow.owner[0];
}

/* Has the entry apply to frames with that source only. */
static __always_inline void fwd_entry_check_mac(struct fwd_entry *entry, const __u8 *mac)
{
	entry->flags |= FWD_CHECK_MAC;
	__builtin_memcpy(entry->src_mac, mac, sizeof(entry->src_mac));
}

/*
 * Creates an entry for p that leaves it to the stack, until the caller changes it.
 * NULL: p gets none. The maximum length is not copied from an older decision, because the
 * route may have a smaller MTU now.
 */
static __noinline struct fwd_entry *fwd_cache_store(struct __sk_buff *skb, const struct packet *p)
{
	const struct fwd_key *key = packet_tuple(p);
	struct fwd_entry *entry;
	struct ethhdr *eth;

	if (!fwd_cacheable(p))
		return NULL;
	entry = fwd_cache_place(p->id);
	if (!entry)
		return NULL;
	entry->key = *key;
	entry->action = FWD_COUNT;
	entry->nat = FWD_NAT_NONE;
	entry->updated = bpf_jiffies64();
	entry->generation = p->decided.generation;
	entry->max_len = packet_segment_len(skb, p);
	entry->flags = p->tcp_syn ? FWD_TRACK : 0;
	entry->flow_kind = 0;
	entry->flow_place = 0;
	entry->hint_id = 0;
	entry->policies = p->decided.policies;
	entry->policy_generation = p->decided.policy_generation;
	eth = p->decided.mac_checked ? linear_at(skb, 0, sizeof(*eth)) : NULL;
	if (eth)
		fwd_entry_check_mac(entry, eth->h_source);
	return entry;
}

/* Has the entry translate that side of its packets to addr:port, if it differs. */
static __always_inline void fwd_entry_translate(struct fwd_entry *entry, enum side side,
						const struct addr *addr, __u16 port)
{
	const struct addr *old = side == SIDE_SRC ? &entry->key.src : &entry->key.dst;

	if (port == (side == SIDE_SRC ? entry->key.sport : entry->key.dport) &&
	    addr_equal(addr, old))
		return;
	entry->nat = side == SIDE_SRC ? FWD_NAT_SRC : FWD_NAT_DST;
	entry->nat_addr = *addr;
	entry->nat_port = port;
}

/* Voids the entry of p, which is too long for its route: the route may have changed. */
static __always_inline void fwd_cache_remove(const struct packet *p)
{
	struct fwd_entry *entry = fwd_cache_find(p);

	if (entry)
		entry->updated = (__u32)bpf_jiffies64() - config.cache_jiffies;
}
