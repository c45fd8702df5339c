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
#include "host_port.h"
#include "socket.h"

/*
 * With n of count ports taken for one remote, a new flow finds none with
 * probability (n/count)^MASQ_PROBES. The flows of one container to a remote do not
 * meet each other with the first candidate, as far as their ports differ modulo count.
 */

#define GOLDEN 0x9e3779b1 /* 2^32 divided by the golden ratio: spreads neighbours far apart */

static __always_inline __u32 hash_mix(__u32 hash, __u32 word)
{
	hash = (hash ^ word) * GOLDEN;
	return hash ^ hash >> 15;
}

/* Of all of the tuple but the container's port. */
static __always_inline __u32 masq_hash(const struct packet *p)
{
	const __u32 *src = (const __u32 *)&p->src, *dst = (const __u32 *)&p->dst;
	__u32 hash = hash_mix(p->protocol, p->dport);

	for (int i = 0; i < 4; i++)
		hash = hash_mix(hash_mix(hash, src[i]), dst[i]);
	return hash;
}

/* The container's port, moved round the range by a way of its own for each i (RFC 6056, 3.3.3). */
static __always_inline __u16 masq_candidate(__u32 hash, __u32 i, __u16 port)
{
	__u32 way = (hash_mix(hash, i) & 0xffffff) + port;

	return config.masq_port_first + way % config.masq_port_count;
}

static __always_inline bool masq_in_range(__u16 port)
{
	return (__u16)(port - config.masq_port_first) < config.masq_port_count;
}

static __always_inline bool flow_is_from(const struct flow *flow, const struct packet *p,
					 __u64 owner)
{
	return flow->nat_port == p->sport && flow->owner == owner &&
	       addr_equal(&flow->nat_addr, &p->src);
}

/* A host port or a socket of the host would get or lose the replies. */
static __always_inline bool masq_port_in_use(struct __sk_buff *skb, const struct packet *p,
					     const struct flow_key *key)
{
	if (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP)
		return false;
	return host_port_at(&key->local, key->local_port, p) ||
	       socket_lookup(skb, p, key) != SOCKET_NONE;
}

/*
 * The container that it is of is still there. Flows are not removed with their owner, which
 * would be a walk over all of them and miss those that a packet makes meanwhile: without it
 * they mean nothing. Its container is the side behind our port, or the one that a client here talks to.
 */
static __always_inline bool flow_owner_alive(const struct flow_key *key, const struct flow *flow)
{
	return flow->owner == OWNER_HOST || endpoint_owned_by(flow->owner, &flow->nat_addr) ||
	       endpoint_owned_by(flow->owner, &key->remote);
}

/* Takes the port in key for p's flow unless another has it. */
static __noinline bool masq_insert(const struct packet *p, const struct flow_key *key, __u64 owner)
{
	struct flow flow = {
		.owner = owner,
		.nat_addr = p->src,
		.nat_port = p->sport,
		.last_seen = now_ticks(),
	};
	struct flow *present = bpf_map_lookup_elem(&flows, key) ?: flow_recover(key);

	if (present) {
		if (!flow_is_from(present, p, owner) && !flow_expired(present, p->protocol) &&
		    flow_owner_alive(key, present))
			return false;
		bpf_map_delete_elem(&flows, key);
		bpf_map_delete_elem(&flows_backup, key);
	}
	if (!bpf_map_update_elem(&flows, key, &flow, BPF_NOEXIST))
		return true;
	/* Another CPU was first: with another packet of this flow, or for another flow. */
	present = bpf_map_lookup_elem(&flows, key);
	return present && flow_is_from(present, p, owner);
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
	key->kind = FLOW_SNAT;
}

/* What the endpoint sends to p's destination keeps its own address. */
static __always_inline bool masq_skips(const struct endpoint *endpoint, const struct packet *p)
{
	struct prefix_key key = {
		.prefixlen = 32 + 128,
		.set = endpoint->nonmasq_set,
		.addr = p->dst,
	};

	if (!(endpoint->flags & ENDPOINT_MASQ) || addr_is_link_scoped(&p->dst, p->ipv6))
		return true;
	return endpoint->nonmasq_set && bpf_map_lookup_elem(&nonmasq_cidrs, &key);
}

/* What those like p's flow have tried. NULL only for the verifier. */
static __always_inline struct masq_probes *masq_probes_of(__u32 hash)
{
	__u32 key = hash % MASQ_PROBE_GROUPS;

	return bpf_map_lookup_elem(&masq_probes, &key);
}

/*
 * Whether p's flow can stand at candidate i. A protocol without ports has one only: whoever
 * is first with a remote has it.
 */
static __always_inline bool masq_probe_used(const struct packet *p,
					    const struct masq_probes *masq_probes, __u32 i)
{
	return !i || (p->has_ports && masq_probes && masq_probes->used[i]);
}

/*
 * Finds p's flow, and its port for key. It may stand behind a candidate that has
 * become free since, so all that were ever tried are looked at.
 */
static __noinline bool masq_lookup(const struct packet *p, struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct masq_probes *masq_probes = masq_probes_of(hash);

	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		struct flow *flow;

		if (!masq_probe_used(p, masq_probes, i))
			break;
		key->local_port = p->has_ports ? masq_candidate(hash, i, p->sport) : 0;
		flow = bpf_map_lookup_elem(&flows, key);
		if (flow && flow_is_from(flow, p, owner)) {
			flow_touch(key, flow, p, false);
			return true;
		}
	}
	return false;
}

/* The same where flows has lost it. */
static __noinline bool masq_recover(const struct packet *p, struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct masq_probes *masq_probes = masq_probes_of(hash);

	if (p->protocol != IPPROTO_TCP || p->tcp_syn)
		return false;
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		struct flow *flow;

		if (!masq_probe_used(p, masq_probes, i))
			break;
		key->local_port = masq_candidate(hash, i, p->sport);
		flow = flow_recover(key);
		if (flow && flow_is_from(flow, p, owner))
			return true;
	}
	return false;
}

/*
 * Takes the port for the flow of the packet at hand, whose key is in claims but for that, unless it is in
 * use. A global function, which the verifier walks through once and not for each turn of the loop and each
 * way to it: with fib_is_local, of 519,000 instructions in all programs that left 281,000, and half the time to load.
 */
__noinline int masq_try_port(struct __sk_buff *skb, __u16 port, __u64 owner)
{
	struct flow_key *key = masq_scratch_get();
	struct packet *p = pkt_scratch_get();

	if (!key || !p)
		return false;
	key->local_port = port;
	return !masq_port_in_use(skb, p, key) && masq_insert(p, key, owner);
}

/*
 * Takes the first free candidate for a flow that was not found. Not for errors:
 * they belong to a flow that is there, or to nothing. p is the packet at hand, or that with another destination.
 */
static __noinline bool masq_alloc_port(struct __sk_buff *skb, const struct packet *p,
				       struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct masq_probes *masq_probes = masq_probes_of(hash);
	struct flow_key *claim = masq_scratch_get();

	if (!claim)
		return false;
	*claim = *key;
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		if (!masq_probes || (i && !p->has_ports))
			break;
		if (i && !masq_probes->used[i]) /* before the flow is there: others look for it */
			masq_probes->used[i] = 1;
		key->local_port = p->has_ports ? masq_candidate(hash, i, p->sport) : 0;
		if (masq_try_port(skb, key->local_port, owner))
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
		.kind = FLOW_SNAT,
	};
	struct flow *flow;

	if (p->has_ports && !masq_in_range(p->dport))
		return NULL;
	flow = bpf_map_lookup_elem(&flows, &key) ?: flow_recover(&key);
	if (flow)
		flow_touch(&key, flow, p, true);
	return flow;
}
