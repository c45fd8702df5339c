/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flows that a remote opens to a container, whose replies leave from the address
 * that the remote used. The key is what the container sees. If one client
 * socket uses two addresses that lead to one port of a container, the container sees
 * another client port for the second, as with netfilter. An entry in use is
 * never overwritten.
 */
#pragma once

#include "flow_table.h"
#include "hash.h"
#include "rewrite.h"
#include "tag.h"

#define DNAT_PROBES   3 /* client ports that a flow may get; the first is its own */
#define DNAT_PORT_MIN 1024
#define DNAT_PORTS    (65536 - DNAT_PORT_MIN)

/* Describes the flow of packets with the tuple to the container at addr:port. */
static __always_inline void dnat_init(struct dnat *d, const struct fwd_key *tuple,
				      const struct addr *addr, __u16 port)
{
	__builtin_memset(d, 0, sizeof(*d));
	d->key.remote = tuple->src;
	d->key.local = *addr;
	d->key.local_port = port;
	d->key.protocol = tuple->protocol;
	d->key.kind = FLOW_DNAT;
}

/* Reports whether the tuple's flow may have a candidate other than its first. */
static __noinline bool dnat_may_have_moved(const struct fwd_key *tuple)
{
	__u32 idle =
		config.timeout[tuple->protocol == IPPROTO_TCP ? FLOW_ESTABLISHED : FLOW_UDP_STREAM];

	return moved_candidates(moved_sides(&tuple->src, &tuple->dst), tuple->dport, idle) > 1;
}

/* Returns a copy of the flow with d's key, or NULL. */
static __noinline struct flow *dnat_lookup(const struct dnat *d)
{
	struct flow_args *args = flow_scratch_get();

	if (!args)
		return NULL;
	args->key = d->key;
	return flow_lookup(args);
}

/*
 * Has the next dnat_find update the flow by the packet in pkt_scratch, if admitted. It is in a map, so the verifier does not
 * follow it.
 */
static __always_inline void dnat_receive(bool admitted)
{
	struct flow_args *args = flow_scratch_get();

	if (args)
		args->access = admitted ? FLOW_RECEIVED : FLOW_READ;
}

/*
 * Finds owner's flow of the tuple, and returns a copy; or finds a free key, and returns NULL.
 * opens: the packet opens a connection.
 */
static __noinline struct flow *dnat_find(const struct fwd_key *tuple, struct dnat *d, __u64 owner,
					 bool opens)
{
	__u16 free_port = tuple->sport, unreplied_port = 0;
	struct flow_args *args = flow_scratch_get();
	__u32 hash = 0, access;

	if (!args)
		return NULL;
	access = args->access;
	args->access = FLOW_READ;
	args->new.owner = owner;
	args->new.nat_addr = tuple->dst;
	args->new.nat_port = tuple->dport;
	args->new.remote_port = tuple->sport;

	for (__u32 i = 0; i < DNAT_PROBES; i++) {
		struct flow *flow;

		if (i == 1)
			hash = hash_secret(&tuple->src, &tuple->dst,
					   (__u64)tuple->sport << 32 | (__u32)tuple->dport << 16 |
						   tuple->protocol);
		d->key.remote_port = i ? DNAT_PORT_MIN + (hash_mix(hash, i) & 0xffffff) % DNAT_PORTS
				       : tuple->sport;
		args->key = d->key;
		flow = flow_access(access) ? &args->flow : NULL;
		if (flow && flow_is_same(flow, &args->new))
			return flow;
		if (!flow || flow->owner != owner || flow_expired(flow) ||
		    (opens && flow_ended(flow))) {
			if (!d->free)
				free_port = d->key.remote_port;
			d->free = true;
			/*
			 * An existing flow may have a later candidate, if this one was in use
			 * then.
			 */
			if (opens || (!i && !dnat_may_have_moved(tuple)))
				break;
		}
		if (!is_tcp_or_udp(tuple->protocol))
			break;
		if (flow && !flow_is_live(flow))
			unreplied_port = d->key.remote_port;
	}
	/*
	 * Anyone could fill all entries with packets that get no reply, so such entries are
	 * reused.
	 */
	if (!d->free && unreplied_port) {
		free_port = unreplied_port;
		d->free = true;
	}
	d->key.remote_port = free_port;
	return NULL;
}

/*
 * Creates the flow of p in the free entry. tuple is p's, when the uplink received it.
 * The flow is provisional until the container replies.
 */
static __noinline long dnat_create(struct packet *p, const struct fwd_key *tuple, struct dnat *d,
				   __u64 owner)
{
	struct flow_args *args = flow_scratch_get();
	struct flow *flow = d->free ? dnat_lookup(d) : NULL;

	if (!args || !d->free || (flow && flow->owner == owner && flow_is_live(flow)))
		return -EEXIST;
	flow = &args->new;
	__builtin_memset(flow, 0, sizeof(*flow));
	flow->owner = owner;
	flow->nat_addr = tuple->dst;
	flow->nat_port = tuple->dport;
	flow->remote_port = tuple->sport;
	flow->uplink = tuple->ifindex;
	flow_open(flow, p, FROM_REMOTE, now_ticks());
	p->decided.first = p->protocol == IPPROTO_UDP;
	/* Before the flow exists, because other CPUs may search for it. */
	moved_record_flow(&d->key, flow, now_ticks());
	return flow_insert() ? 0 : -ENOSPC;
}

/* Gives p the client port that the container sees (SIDE_SRC), or in a reply the client's own (SIDE_DST). */
static __always_inline long dnat_set_client(struct __sk_buff *skb, struct packet *p, enum side side,
					    __u16 port)
{
	__u16 *old = side == SIDE_SRC ? &p->sport : &p->dport;
	long err;

	if (*old == port || !is_tcp_or_udp(p->protocol))
		return 0;
	err = rewrite(skb, p, side, side == SIDE_SRC ? &p->src : &p->dst, port);
	*old = port;
	packet_set_id(p);
	p->decided.remapped = true;
	return err;
}
