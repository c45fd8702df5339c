/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The life of an entry in flows. */
#pragma once

#include "maps.h"
#include "parse.h"

/* Time is counted in ticks of 2^30 ns, 1.07 s: a shift, and one write per flow and tick. */
#define TICK_SHIFT 30
#define TICKS(seconds) ((seconds) * 1000000000ULL >> TICK_SHIFT)

/* Idle times after which a masquerading port is free again; netfilter's defaults (nf_conntrack_*_timeout). */
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

/*
 * Notes that p's sender reaches the container at addr:port under the address
 * and port that p carries, so that the answers carry them too (flow_reply).
 * Written again whenever it is missing or different: a lost entry comes back
 * with the next packet, and a port that leads elsewhere now takes its flows along.
 */
static __noinline long flow_remember(const struct packet *p, const struct addr *addr, __u16 port,
				     __u64 owner)
{
	struct flow_key key = {
		.remote = p->src,
		.local = *addr,
		.remote_port = p->sport,
		.local_port = port,
		.protocol = p->protocol,
		.kind = FLOW_IN,
	};
	struct flow *known = bpf_map_lookup_elem(&flows, &key);
	struct flow flow = {
		.owner = owner,
		.addr = p->dst,
		.port = p->dport,
	};

	if (known && known->owner == owner && known->port == p->dport &&
	    addr_equal(&known->addr, &p->dst)) {
		flow_touch(known, p, false);
		return 0;
	}
	flow.seen = now_ticks();
	return bpf_map_update_elem(&flows, &key, &flow, BPF_ANY);
}

/* The entry of the connection that p, sent by a container, answers; NULL where it answers none. */
static __always_inline struct flow *flow_reply(const struct packet *p)
{
	struct flow_key key = {
		.remote = p->dst,
		.local = p->src,
		.remote_port = p->dport,
		.local_port = p->sport,
		.protocol = p->protocol,
		.kind = FLOW_IN,
	};
	struct flow *flow = bpf_map_lookup_elem(&flows, &key);

	if (flow)
		flow_touch(flow, p, true);
	return flow;
}
