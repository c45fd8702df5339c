/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The life of an entry in flows. */
#pragma once

#include "maps.h"
#include "parse.h"

/* Time is counted in ticks of 2^30 ns, 1.07 s: a shift, and one write per flow and tick. */
#define TICK_SHIFT     30
#define TICKS(seconds) ((seconds) * 1000000000ULL >> TICK_SHIFT)

/* Idle times after which a masquerading port is free again; netfilter's defaults
 * (nf_conntrack_*_timeout). */
#define TIMEOUT_TCP_OPENING TICKS(120)
#define TIMEOUT_TCP_OPEN    TICKS(432000)
#define TIMEOUT_TCP_CLOSING TICKS(120)
#define TIMEOUT_UDP_OPENING TICKS(30)
#define TIMEOUT_UDP_OPEN    TICKS(120)
#define TIMEOUT_ECHO	    TICKS(30)

static __always_inline __u32 now_ticks(void)
{
	return bpf_ktime_get_ns() >> TICK_SHIFT;
}

/* A packet of the flow went by. Writes only what changed: the line stays shared between CPUs. */
static __always_inline void flow_touch(struct flow *flow, const struct packet *p, bool reply)
{
	__u8 state = p->tcp_syn ? 0 : flow->state;
	__u32 now = now_ticks();

	if (p->error)
		return;
	if (reply)
		state |= FLOW_REPLIED;
	if (p->tcp_end)
		state |= FLOW_CLOSING;
	if (flow->state != state)
		flow->state = state;
	if (flow->seen != now)
		flow->seen = now;
}

static __always_inline bool flow_expired(const struct flow *flow, __u8 protocol)
{
	__u32 idle = now_ticks() - flow->seen;

	if ((__s32)idle < 0) /* another CPU has seen the next tick already */
		return false;
	switch (protocol) {
	case IPPROTO_TCP:
		if (flow->state & FLOW_CLOSING)
			return idle > TIMEOUT_TCP_CLOSING;
		return idle > (flow->state & FLOW_REPLIED ? TIMEOUT_TCP_OPEN : TIMEOUT_TCP_OPENING);
	case IPPROTO_UDP:
		return idle > (flow->state & FLOW_REPLIED ? TIMEOUT_UDP_OPEN : TIMEOUT_UDP_OPENING);
	default:
		return idle > TIMEOUT_ECHO;
	}
}

/* The key under which the answers of a container at addr:port to p's sender are looked for. */
static __always_inline void flow_in_key(struct flow_key *key, const struct packet *p,
					const struct addr *addr, __u16 port)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = p->src;
	key->local = *addr;
	key->remote_port = p->sport;
	key->local_port = port;
	key->protocol = p->protocol;
	key->kind = FLOW_IN;
}

/* The entry for the answers of the container at addr:port to p's sender, or NULL. */
static __always_inline struct flow *flow_in(const struct packet *p, const struct addr *addr,
					    __u16 port)
{
	struct flow_key key;

	flow_in_key(&key, p, addr, port);
	return bpf_map_lookup_elem(&flows, &key);
}

/* The entry says what p does: that its sender asked for p's address and port. Notes that it was seen. */
static __always_inline bool flow_fits(struct flow *flow, const struct packet *p, __u64 owner)
{
	if (flow->owner != owner || flow->port != p->dport || !addr_equal(&flow->addr, &p->dst))
		return false;
	flow_touch(flow, p, false);
	return true;
}

/*
 * Makes the answers carry what the client asked for. Written
 * again whenever it is missing or different: a lost entry comes back with the
 * next packet, and a port that leads elsewhere now takes its flows along.
 */
static __noinline long flow_remember(const struct packet *p, const struct addr *addr, __u16 port,
				     __u64 owner)
{
	struct flow_key key;
	struct flow flow = {
		.owner = owner,
		.addr = p->dst,
		.port = p->dport,
		.seen = now_ticks(),
	};

	flow_in_key(&key, p, addr, port);
	return bpf_map_update_elem(&flows, &key, &flow, BPF_ANY);
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
	key->kind = FLOW_IN;
}

/* The entry of the connection that p, sent by a container, answers; NULL where it answers none. */
static __always_inline struct flow *flow_reply(const struct packet *p)
{
	struct flow_key key;
	struct flow *flow;

	flow_reply_key(&key, p);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (flow)
		flow_touch(flow, p, true);
	return flow;
}

/* Makes that entry anew: the client asked for addr:port. */
static __always_inline long flow_restore(const struct packet *p, const struct addr *addr,
					 __u16 port, __u64 owner)
{
	struct flow_key key;
	struct flow flow = {
		.owner = owner,
		.addr = *addr,
		.port = port,
		.seen = now_ticks(),
		.state = FLOW_REPLIED,
	};

	flow_reply_key(&key, p);
	return bpf_map_update_elem(&flows, &key, &flow, BPF_ANY);
}
