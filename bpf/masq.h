/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Masquerading with a single entry per flow: (remote, our address, allocated port)
 * gives the container's address and port, and translates replies. Outbound packets
 * find their port by probing a fixed sequence of candidates, computed from their
 * own tuple. So no second entry can be lost alone, and a flow whose entry was
 * evicted gets the same port again.
 */
#pragma once

#include "endpoint.h"
#include "flow.h"
#include "host_port.h"
#include "scratch.h"
#include "socket.h"

#define GOLDEN 0x9e3779b1 /* 2^32 divided by the golden ratio: spreads neighbors far apart */

static __always_inline __u32 hash_mix(__u32 hash, __u32 word)
{
	hash = (hash ^ word) * GOLDEN;
	return hash ^ hash >> 15;
}

/* The hash of the tuple without the container's port. */
static __always_inline __u32 masq_hash(const struct packet *p)
{
	const __u32 *src = (const __u32 *)&p->src, *dst = (const __u32 *)&p->dst;
	__u32 hash = hash_mix(p->protocol, p->dport);

	for (int i = 0; i < 4; i++)
		hash = hash_mix(hash_mix(hash, src[i]), dst[i]);
	return hash;
}

/*
 * Candidate i: the container's port plus an offset given by the hash and i, modulo
 * the size of the range (RFC 6056, 3.3.3). So a container's flows to one remote
 * differ in their first candidates. A flow finds no port with probability
 * (n/count)^MASQ_PROBES if n of count ports are taken for its remote.
 */
static __always_inline __u16 masq_candidate(__u32 hash, __u32 i, __u16 port)
{
	__u32 moved = (hash_mix(hash, i) & 0xffffff) + port;

	return config.masq_port_first + moved % config.masq_port_count;
}

static __always_inline bool masq_in_range(__u16 port)
{
	return (__u16)(port - config.masq_port_first) < config.masq_port_count;
}

/* The flow is p's: of owner, from p's source. */
static __always_inline bool masq_matches(const struct flow *flow, const struct packet *p,
					 __u64 owner)
{
	return flow->nat_port == p->sport && flow->owner == owner &&
	       addr_equal(&flow->nat_addr, &p->src);
}

/* All of the key of p's flow from source, except the port. */
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

/* The entry of p's flow. */
static __always_inline void masq_flow(struct flow *flow, const struct packet *p, __u64 owner)
{
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->owner = owner;
	flow->nat_addr = p->src;
	flow->nat_port = p->sport;
	flow->last_seen = now_ticks();
}

/* What the endpoint sends to p's destination keeps its own source. */
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

/* A host port or a socket of the host receives what the key's remote sends to the port. */
static __always_inline bool masq_port_in_use(struct __sk_buff *skb, const struct flow_key *key,
					     bool ipv6)
{
	if (!is_tcp_or_udp(key->protocol))
		return false;
	return host_port_find(&key->local, key->local_port, key->protocol, ipv6) ||
	       socket_lookup(skb, key, ipv6) != SOCKET_NONE;
}

/*
 * The flow's container still exists. DEL leaves its flows alone: it would have to
 * walk over all of them, and would miss those that packets add meanwhile. The
 * container is behind our port or, for hairpin clients, is the remote.
 */
static __always_inline bool masq_owner_is_alive(const struct flow_key *key, const struct flow *flow)
{
	return flow->owner == OWNER_HOST || endpoint_is_owned_by(&flow->nat_addr, flow->owner) ||
	       endpoint_is_owned_by(&key->remote, flow->owner);
}

static __always_inline bool masq_is_same(const struct flow *a, const struct flow *b)
{
	return a->nat_port == b->nat_port && a->owner == b->owner &&
	       addr_equal(&a->nat_addr, &b->nat_addr);
}

/* Allocates the port in key to the flow. Returns false if another flow has it. */
static __noinline bool masq_insert(const struct flow_key *key, const struct flow *flow)
{
	struct flow *other = bpf_map_lookup_elem(&flows, key) ?: flow_recover(key);

	if (other) {
		if (!masq_is_same(other, flow) && !flow_expired(other, key->protocol) &&
		    masq_owner_is_alive(key, other))
			return false;
		bpf_map_delete_elem(&flows, key);
		bpf_map_delete_elem(&flows_backup, key);
	}
	if (!bpf_map_update_elem(&flows, key, flow, BPF_NOEXIST))
		return true;
	/* Another CPU was first: with a packet of the same flow, or of another one. */
	other = bpf_map_lookup_elem(&flows, key);
	return other && masq_is_same(other, flow);
}

/* The probes of flows like p's. NULL only for the verifier. */
static __always_inline struct masq_probes *masq_probes_lookup(__u32 hash)
{
	__u32 key = hash % MASQ_PROBE_GROUPS;

	return bpf_map_lookup_elem(&masq_probes, &key);
}

/*
 * p's flow may have candidate i. A protocol without ports has a single candidate,
 * so one container at a time can use it with a remote.
 */
static __always_inline bool masq_probe_used(const struct packet *p,
					    const struct masq_probes *probes, __u32 i)
{
	return !i || (p->has_ports && probes && probes->used[i]);
}

/*
 * Finds p's flow, and sets its port in key. Looks at all candidates ever used, as
 * those before the flow's own may have become free since.
 */
static __noinline bool masq_track(const struct packet *p, struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct masq_probes *probes = masq_probes_lookup(hash);

	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		struct flow *flow;

		if (!masq_probe_used(p, probes, i))
			break;
		key->local_port = p->has_ports ? masq_candidate(hash, i, p->sport) : 0;
		flow = bpf_map_lookup_elem(&flows, key);
		if (flow && masq_matches(flow, p, owner)) {
			flow_touch(key, flow, p, false);
			return true;
		}
	}
	return false;
}

/* The same if the entry was evicted. */
static __noinline bool masq_recover(const struct packet *p, struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct masq_probes *probes = masq_probes_lookup(hash);

	if (p->protocol != IPPROTO_TCP || p->tcp_syn)
		return false;
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		struct flow *flow;

		if (!masq_probe_used(p, probes, i))
			break;
		key->local_port = masq_candidate(hash, i, p->sport);
		flow = flow_recover(key);
		if (flow && masq_matches(flow, p, owner))
			return true;
	}
	return false;
}

/*
 * Allocates candidate i to the flow in masq_scratch, and sets it there. A global
 * function, so that the verifier checks it once, and not for each iteration of
 * masq_alloc_port.
 */
__noinline int masq_try_candidate(struct __sk_buff *skb, __u32 hash, __u32 i)
{
	struct masq_args *args = masq_scratch_get();
	__u16 port;

	if (!args)
		return false;
	port = args->has_ports ? masq_candidate(hash, i, args->flow.nat_port) : 0;
	args->key.local_port = port;
	return !masq_port_in_use(skb, &args->key, args->ipv6) &&
	       masq_insert(&args->key, &args->flow);
}

/*
 * Allocates the first free candidate to p's flow, which was not found, and sets it
 * in key. Not for ICMP errors: they belong to a known flow, or to none.
 */
static __noinline bool masq_alloc_port(struct __sk_buff *skb, const struct packet *p,
				       struct flow_key *key, __u64 owner)
{
	__u32 hash = masq_hash(p);
	struct masq_probes *probes = masq_probes_lookup(hash);
	struct masq_args *args = masq_scratch_get();

	if (!probes || !args)
		return false;
	args->key = *key;
	args->ipv6 = p->ipv6;
	args->has_ports = p->has_ports;
	masq_flow(&args->flow, p, owner);
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		if (i && !p->has_ports)
			break;
		if (i && !probes->used[i]) /* before the flow exists: other CPUs look for it */
			probes->used[i] = 1;
		if (masq_try_candidate(skb, hash, i)) {
			key->local_port = args->key.local_port;
			return true;
		}
	}
	return false;
}

/* The masqueraded flow that p, from the outside or a container, is a reply to; or NULL. */
static __always_inline struct flow *masq_track_reply(const struct packet *p)
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
