/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The life of an entry in flows. */
#pragma once

#include "maps.h"
#include "parse.h"
#include "time.h"

static __always_inline bool flow_ended(const struct flow *flow)
{
	return (flow->state & FLOW_FIN) && (flow->state & FLOW_FIN_REPLY);
}

/* Keeps the second entry of a connection up to date, and only of one that lives. */
static __noinline void flow_backup(const struct flow_key *key, const struct flow *flow)
{
	if (key->protocol != IPPROTO_TCP)
		return;
	if (flow_ended(flow))
		bpf_map_delete_elem(&flows_backup, key);
	else if (flow->state & FLOW_REPLIED)
		bpf_map_update_elem(&flows_backup, key, flow, BPF_ANY);
}

/* The entry that flows has lost, from the second one; NULL where there is none. */
static __always_inline struct flow *flow_recover(const struct flow_key *key)
{
	struct flow *kept;

	if (key->protocol != IPPROTO_TCP)
		return NULL;
	kept = bpf_map_lookup_elem(&flows_backup, key);
	if (!kept)
		return NULL;
	bpf_map_update_elem(&flows, key, kept, BPF_NOEXIST); /* or another CPU has */
	return bpf_map_lookup_elem(&flows, key);
}

/* A packet of the flow went by. Writes only what changed: the line stays shared between CPUs. */
static __always_inline void flow_touch(const struct flow_key *key, struct flow *flow,
				       const struct packet *p, bool reply)
{
	__u8 state = p->tcp_syn ? 0 : flow->state;
	__u32 now = now_ticks();

	if (p->icmp_error)
		return;
	if (state & FLOW_RST && !p->tcp_rst) /* nobody believed it: out of the window, or forged */
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

	if ((__s32)idle < 0) /* another CPU has seen the next tick already */
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

/* The key under which the answers of a container at addr:port to p's sender are looked for. */
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

/*
 * The entry for the answers in key is there, and says what p does: that its
 * sender asked for p's address and port. Notes that it was seen.
 */
static __always_inline bool flow_dnat_matches(const struct flow_key *key, const struct packet *p,
					      __u64 owner)
{
	struct flow *flow = bpf_map_lookup_elem(&flows, key);

	if (!flow || flow->owner != owner || flow->nat_port != p->dport ||
	    !addr_equal(&flow->nat_addr, &p->dst))
		return false;
	flow_touch(key, flow, p, false);
	return true;
}

/*
 * Makes the answers carry what the client asked for. Written
 * again whenever it is missing or different: a lost entry comes back with the
 * next packet, and a port that leads elsewhere now takes its flows along.
 */
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

/* The key of the connection that p, sent by a container, answers. */
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

/* The entry of the connection that p, sent by a container, answers; NULL where it answers none. */
static __always_inline struct flow *flow_reply(const struct packet *p)
{
	struct flow_key key;
	struct flow *flow;

	flow_reply_key(&key, p);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (flow)
		flow_touch(&key, flow, p, true);
	return flow;
}

/* The same where flows has lost it. */
static __noinline struct flow *flow_reply_lost(const struct packet *p)
{
	struct flow_key key;

	flow_reply_key(&key, p);
	return flow_recover(&key);
}

/* Makes that entry anew: the client asked for addr:port. */
static __always_inline long flow_dnat_restore(const struct packet *p, const struct addr *addr,
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
