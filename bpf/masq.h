/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Masquerading with a single entry: (remote, our address, chosen port) gives
 * the container's address and port, and serves the replies. Outgoing packets
 * find the chosen port by probing a fixed sequence of candidates made from
 * their own tuple, so there is no second entry that could be lost alone, and a
 * flow whose entry was evicted claims the same port again.
 */
#pragma once

#include "fib.h"
#include "flow.h"
#include "port.h"
#include "socket.h"

/*
 * With n of count ports taken for one remote, a new flow finds none with
 * probability (n/count)^MASQ_PROBES. The flows of one container to a remote do not
 * meet each other with the first candidate, as far as their ports differ modulo count.
 */

#define GOLDEN 0x9e3779b1 /* 2^32 divided by the golden ratio: spreads neighbours far apart */

static __always_inline __u32 mix(__u32 hash, __u32 word)
{
	hash = (hash ^ word) * GOLDEN;
	return hash ^ hash >> 15;
}

/* Of all of the tuple but the container's port. */
static __always_inline __u32 masq_hash(const struct packet *p)
{
	const __u32 *src = (const __u32 *)&p->src, *dst = (const __u32 *)&p->dst;
	__u32 hash = mix(p->protocol, p->dport);

	for (int i = 0; i < 4; i++)
		hash = mix(mix(hash, src[i]), dst[i]);
	return hash;
}

/* The container's port, moved round the range by a way of its own for each i (RFC 6056, 3.3.3). */
static __always_inline __u16 masq_candidate(__u32 hash, __u32 i, __u16 port)
{
	__u32 way = (mix(hash, i) & 0xffffff) + port;

	return config.masq_port_first + way % config.masq_port_count;
}

static __always_inline bool masq_in_range(__u16 port)
{
	return (__u16)(port - config.masq_port_first) < config.masq_port_count;
}

static __always_inline bool flow_is(const struct flow *flow, const struct packet *p, __u64 owner)
{
	return flow->port == p->sport && flow->owner == owner && addr_equal(&flow->addr, &p->src);
}

/* A host port or a socket of the host would get or lose the replies. */
static __always_inline bool masq_port_in_use(struct __sk_buff *skb, const struct packet *p,
					     const struct flow_key *key)
{
	if (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP)
		return false;
	return port_at(&key->local, key->local_port, p) || socket_at(skb, p, key) != SOCKET_NONE;
}

/*
 * The container that it is of is still there. Flows are not removed with their owner, which
 * would be a walk over all of them and miss those that a packet makes meanwhile: without it
 * they mean nothing. Its container is the side behind our port, or the one that a client here talks to.
 */
static __always_inline bool flow_lives(const struct flow_key *key, const struct flow *flow)
{
	return flow->owner == OWNER_HOST || owns(flow->owner, &flow->addr) ||
	       owns(flow->owner, &key->remote);
}

/* Takes the port in key for p's flow unless another has it. */
static __noinline bool masq_take(const struct packet *p, const struct flow_key *key, __u64 owner)
{
	struct flow flow = {
		.owner = owner,
		.addr = p->src,
		.port = p->sport,
		.seen = now_ticks(),
	};
	struct flow *present = bpf_map_lookup_elem(&flows, key) ?: flow_recover(key);

	if (present) {
		if (!flow_is(present, p, owner) && !flow_expired(present, p->protocol) &&
		    flow_lives(key, present))
			return false;
		bpf_map_delete_elem(&flows, key);
		bpf_map_delete_elem(&established, key);
	}
	if (!bpf_map_update_elem(&flows, key, &flow, BPF_NOEXIST))
		return true;
	/* Another CPU was first: with another packet of this flow, or for another flow. */
	present = bpf_map_lookup_elem(&flows, key);
	return present && flow_is(present, p, owner);
}

/* All of the key of p's flow from source but the port. */
static __always_inline void masq_key(struct flow_key *key, const struct packet *p,
				     const struct addr *source)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = p->dst;
	key->local = *source;
	key->remote_port = p->dport;
	key->protocol = p->protocol;
	key->kind = FLOW_OUT;
}

/* What the endpoint sends to p's destination keeps its own address. */
static __always_inline bool masq_exempts(const struct endpoint *endpoint, const struct packet *p)
{
	struct prefix_key key = {
		.prefix = 32 + 128,
		.set = endpoint->exempt,
		.addr = p->dst,
	};

	if (!(endpoint->flags & ENDPOINT_MASQ) || addr_is_link_scoped(&p->dst, p->ipv6))
		return true;
	return endpoint->exempt && bpf_map_lookup_elem(&exempts, &key);
}

/* What those like p's flow have tried. NULL only for the verifier. */
static __always_inline struct tried *masq_tried(__u32 hash)
{
	__u32 key = hash % MASQ_REMOTES;

	return bpf_map_lookup_elem(&tried, &key);
}

/*
 * Whether p's flow can stand at candidate i. A protocol without ports has one only: whoever
 * is first with a remote has it.
 */
static __always_inline bool masq_may_be_at(const struct packet *p, const struct tried *tried,
					   __u32 i)
{
	return !i || (p->ported && tried && tried->candidate[i]);
}

/*
 * Finds p's flow, and its port for key. It may stand behind a candidate that has
 * become free since, so all that were ever tried are looked at.
 */
static __noinline bool masq_find(const struct packet *p, struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct tried *tried = masq_tried(hash);

	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		struct flow *flow;

		if (!masq_may_be_at(p, tried, i))
			break;
		key->local_port = p->ported ? masq_candidate(hash, i, p->sport) : 0;
		flow = bpf_map_lookup_elem(&flows, key);
		if (flow && flow_is(flow, p, owner)) {
			flow_touch(key, flow, p, false);
			return true;
		}
	}
	return false;
}

/* The same where flows has lost it. */
static __noinline bool masq_find_lost(const struct packet *p, struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct tried *tried = masq_tried(hash);

	if (p->protocol != IPPROTO_TCP || p->tcp_syn)
		return false;
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		struct flow *flow;

		if (!masq_may_be_at(p, tried, i))
			break;
		key->local_port = masq_candidate(hash, i, p->sport);
		flow = flow_recover(key);
		if (flow && flow_is(flow, p, owner))
			return true;
	}
	return false;
}

/*
 * Takes the port for the flow of the packet at hand, whose key is in claims but for that, unless it is in
 * use. A global function, which the verifier walks through once and not for each turn of the loop and each
 * way to it: with fib_is_local, of 519,000 instructions in all programs that left 281,000, and half the time to load.
 */
__noinline int masq_try(struct __sk_buff *skb, __u16 port, __u64 owner)
{
	struct flow_key *key = claim_place();
	struct packet *p = packet_place();

	if (!key || !p)
		return false;
	key->local_port = port;
	return !masq_port_in_use(skb, p, key) && masq_take(p, key, owner);
}

/*
 * Takes the first free candidate for a flow that was not found. Not for errors:
 * they belong to a flow that is there, or to nothing. p is the packet at hand, or that with another destination.
 */
static __noinline bool masq_claim(struct __sk_buff *skb, const struct packet *p,
				  struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct tried *tried = masq_tried(hash);
	struct flow_key *claim = claim_place();

	if (!claim)
		return false;
	*claim = *key;
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		if (!tried || (i && !p->ported))
			break;
		if (i && !tried->candidate[i]) /* before the flow is there: others look for it */
			tried->candidate[i] = 1;
		key->local_port = p->ported ? masq_candidate(hash, i, p->sport) : 0;
		if (masq_try(skb, key->local_port, owner))
			return true;
	}
	return false;
}

/* The flow that p, come in from the outside, answers; NULL where it answers none. */
static __always_inline struct flow *masq_reply(const struct packet *p)
{
	struct flow_key key = {
		.remote = p->src,
		.local = p->dst,
		.remote_port = p->sport,
		.local_port = p->dport,
		.protocol = p->protocol,
		.kind = FLOW_OUT,
	};
	struct flow *flow;

	if (p->ported && !masq_in_range(p->dport))
		return NULL;
	flow = bpf_map_lookup_elem(&flows, &key) ?: flow_recover(&key);
	if (flow)
		flow_touch(&key, flow, p, true);
	return flow;
}
