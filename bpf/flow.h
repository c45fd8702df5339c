/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Entries of flows, and how long they live. A function that tracks finds the
 * packet's entry and notes that it was used; one that looks up only reads.
 */
#pragma once

#include "fwd_cache.h"
#include "maps.h"
#include "parse.h"
#include "time.h"

static __always_inline bool flow_ended(const struct flow *flow)
{
	return (flow->state & FLOW_FIN) && (flow->state & FLOW_FIN_REPLY);
}

/* Updates the copy in flows_backup. Only established connections have one. */
static __noinline void flow_backup(const struct flow_key *key, const struct flow *flow)
{
	if (key->protocol != IPPROTO_TCP)
		return;
	if (flow_ended(flow))
		bpf_map_delete_elem(&flows_backup, key);
	else if (flow->state & FLOW_REPLIED)
		bpf_map_update_elem(&flows_backup, key, flow, BPF_ANY);
}

/* Restores an evicted entry from flows_backup, or returns NULL. */
static __always_inline struct flow *flow_recover(const struct flow_key *key)
{
	struct flow *backup;

	if (key->protocol != IPPROTO_TCP)
		return NULL;
	backup = bpf_map_lookup_elem(&flows_backup, key);
	if (!backup)
		return NULL;
	/* Another CPU may have restored it already. */
	bpf_map_update_elem(&flows, key, backup, BPF_NOEXIST);
	return bpf_map_lookup_elem(&flows, key);
}

/* Notes a packet of the flow. Writes changes only, so that CPUs can share the cache line. */
static __always_inline void flow_touch(const struct flow_key *key, struct flow *flow,
				       const struct packet *p, bool reply)
{
	__u8 state = p->tcp_syn ? 0 : flow->state;
	__u32 now = now_ticks();

	if (p->icmp_error)
		return;
	if (state & FLOW_RST && !p->tcp_rst) /* the RST was ignored: out of the window, or forged */
		state &= ~(FLOW_RST | FLOW_FIN | FLOW_FIN_REPLY);
	if (reply)
		state |= FLOW_REPLIED;
	if (p->tcp_rst)
		state |= FLOW_RST | FLOW_FIN | FLOW_FIN_REPLY;
	else if (p->tcp_fin)
		state |= reply ? FLOW_FIN_REPLY : FLOW_FIN;
	if (flow->state == state && flow->last_seen == now)
		return;
	flow->state = state;
	flow->last_seen = now;
	flow_backup(key, flow);
}

static __always_inline bool flow_expired(const struct flow *flow, __u8 protocol)
{
	__u32 idle = now_ticks() - flow->last_seen;
	bool replied = flow->state & FLOW_REPLIED;

	if ((__s32)idle < 0) /* another CPU is a tick ahead */
		return false;
	switch (protocol) {
	case IPPROTO_TCP:
		if (flow->state & (FLOW_FIN | FLOW_FIN_REPLY))
			return idle > config.timeout.tcp_closing;
		return idle >
		       (replied ? config.timeout.tcp_established : config.timeout.tcp_unreplied);
	case IPPROTO_UDP:
		return idle > (replied ? config.timeout.udp_stream : config.timeout.udp_unreplied);
	default:
		return idle > config.timeout.other;
	}
}

/* The key for p, which opens or continues a connection to the container at addr:port. */
static __always_inline void flow_dnat_key(struct flow_key *key, const struct packet *p,
					  const struct addr *addr, __u16 port)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = p->src;
	key->local = *addr;
	key->remote_port = p->sport;
	key->local_port = port;
	key->protocol = p->protocol;
	key->kind = FLOW_DNAT;
}

/* Returns the entry if it gives replies p's destination as their source, else NULL. */
static __always_inline struct flow *flow_dnat_lookup(const struct flow_key *key,
						     const struct packet *p, __u64 owner)
{
	struct flow *flow = bpf_map_lookup_elem(&flows, key);

	if (!flow || flow->owner != owner || flow->nat_port != p->dport ||
	    !addr_equal(&flow->nat_addr, &p->dst))
		return NULL;
	return flow;
}

/* Gives replies p's destination as their source. */
static __noinline long flow_dnat_store(const struct flow_key *key, const struct packet *p,
				       __u64 owner)
{
	struct flow flow = {
		.owner = owner,
		.nat_addr = p->dst,
		.nat_port = p->dport,
		.last_seen = now_ticks(),
	};

	return bpf_map_update_elem(&flows, key, &flow, BPF_ANY);
}

/*
 * The same for an entry that is missing or wrong. The client's next packet thus
 * restores a lost entry, and moves its flow when a host port gets a new target.
 */
static __noinline long flow_dnat_replace(const struct flow_key *key, const struct packet *p,
					 __u64 owner)
{
	struct flow *old = bpf_map_lookup_elem(&flows, key);

	if (old)
		fwd_cache_forget(key, p, old);
	return flow_dnat_store(key, p, owner);
}

/* The key for p, sent by a container as a reply. */
static __always_inline void flow_reply_key(struct flow_key *key, const struct packet *p)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = p->dst;
	key->local = p->src;
	key->remote_port = p->dport;
	key->local_port = p->sport;
	key->protocol = p->protocol;
	key->kind = FLOW_DNAT;
}

/* The flow that p, sent by a container, is a reply to; or NULL. */
static __always_inline struct flow *flow_track_reply(const struct packet *p)
{
	struct flow_key key;
	struct flow *flow;

	flow_reply_key(&key, p);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (flow)
		flow_touch(&key, flow, p, true);
	return flow;
}

/* The same if the entry was evicted. */
static __noinline struct flow *flow_recover_reply(const struct packet *p)
{
	struct flow_key key;

	flow_reply_key(&key, p);
	return flow_recover(&key);
}

/* Creates that entry: the client used addr:port. */
static __always_inline long flow_store_reply(const struct packet *p, const struct addr *addr,
					     __u16 port, __u64 owner)
{
	struct flow_key key;
	struct flow flow = {
		.owner = owner,
		.nat_addr = *addr,
		.nat_port = port,
		.last_seen = now_ticks(),
		.state = FLOW_REPLIED,
	};

	flow_reply_key(&key, p);
	return bpf_map_update_elem(&flows, &key, &flow, BPF_ANY);
}
