/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Forwarding past the stack: into a container by bpf_redirect_peer, out by a
 * question to the routing table and bpf_redirect_neigh. What it does not do as a
 * router would, it leaves to the stack: errors to the sender, options, fragments.
 */
#pragma once

#include "checksum.h"
#include "fib.h"
#include "offload.h"
#include "verdict.h"
#include "way.h"

/* A connection that may go past the stack, and by what. */
struct fast {
	struct connection c;
	struct offload *offload; /* NULL: fastPath is always */
};

/* Whether the connection of p with addr:port may go past the stack. Its owners are known. */
static __noinline bool fast_lookup(const struct packet *p, struct fast *fast, __u8 path,
				   const struct addr *addr, __u16 port)
{
	fast->offload = NULL;
	if (!p->plain || p->ttl <= 1 || path == FAST_NEVER)
		return false;
	if (path == FAST_ALWAYS)
		return true;
	connect(&fast->c, p, addr, port);
	fast->offload = offload_ready(p, &fast->c);
	return fast->offload;
}

/* p goes: what is to be done to it, whichever way it takes. */
static __always_inline long fast_pass(struct __sk_buff *skb, const struct packet *p,
				      const struct fast *fast)
{
	long err = fast->offload ? offload_pass(skb, p, &fast->c, fast->offload) : 0;

	return err ?: decrement_ttl(skb, p);
}

/* Gives p, whose headers are done, to the container; and those after it, with addr:port as their destination. */
static __noinline int into_container(struct __sk_buff *skb, const struct packet *p,
				     const struct endpoint *to, const struct addr *addr, __u16 port)
{
	struct way way = {
		.ifindex = to->ifindex,
		.side = SIDE_DST,
		.addr = *addr,
		.port = port,
		.translated = port != p->dport || !addr_equal(addr, &p->dst),
	};

	/* They stand in one piece there. */
	__builtin_memcpy(&way.next, to->mac, sizeof(to->mac) + sizeof(to->host_mac));
	way_keep(skb, p, (const struct way_key *)p, &way);
	if (bpf_skb_store_bytes(skb, 0, &way.next, 2 * ETH_ALEN, 0))
		return drop(skb, REASON_NOT_WRITTEN);
	return bpf_redirect_peer(to->ifindex, 0);
}

/* p leaves past the stack as from addr:port; those after it need not come by here. */
static __noinline void keep_way_out(struct __sk_buff *skb, const struct packet *p,
				    const struct addr *addr, __u16 port)
{
	struct way_key key = *(const struct way_key *)p;
	struct way way = {
		.ifindex = skb->ifindex,
		.side = SIDE_SRC,
		.addr = *addr,
		.port = port,
		.translated = port != p->sport || !addr_equal(addr, &p->src),
	};
	struct next_hop next;

	key.ifindex = skb->ingress_ifindex;
	if (fib_next_hop(skb, p, key.ifindex, segment_length(skb, p), &next) ||
	    next.ifindex != skb->ifindex)
		return;
	way.family = next.neigh.nh_family;
	__builtin_memcpy(&way.next, next.neigh.ipv6_nh, sizeof(way.next));
	way_keep(skb, p, &key, &way);
}

/*
 * The client in key asks another address than before, which its packets and the answers
 * must not go the short way for any more. p came in by an uplink.
 */
static __noinline void forget_ways(const struct flow_key *key, const struct packet *p,
				   const struct flow *before)
{
	struct endpoint *to = bpf_map_lookup_elem(&endpoints, &key->local);
	struct way_key way = *(const struct way_key *)p;

	way.dst = before->addr;
	way.dport = before->port;
	bpf_map_delete_elem(&ways, &way);
	if (!to)
		return;
	way.src = key->local;
	way.dst = key->remote;
	way.sport = key->local_port;
	way.dport = key->remote_port;
	way.ifindex = to->ifindex;
	bpf_map_delete_elem(&ways, &way);
}

/*
 * The way that a container has to others, or to the outside: what its queue holds
 * to a rate has to go by it. Where it takes packets from some containers only, the
 * stack has to bring the first of each connection, by to_container.
 */
static __always_inline __u8 path_of(const struct endpoint *endpoint, bool to_others)
{
	struct device *device = bpf_map_lookup_elem(&devices, &endpoint->ifindex);

	if (device && device->flags & DEVICE_SHAPED)
		return FAST_NEVER;
	if (device && to_others && device->ingress != POLICY_OPEN)
		return endpoint->fast & FAST_ESTABLISHED;
	return endpoint->fast;
}

/* From one container to another. */
static __noinline int fast_between(struct __sk_buff *skb, const struct packet *p,
				   const struct endpoint *from, const struct endpoint *to)
{
	struct fast fast;

	fast.c.owners = from->owner ^ to->owner;
	if (skb->pkt_type != PACKET_HOST || segment_length(skb, p) > to->mtu ||
	    !fast_lookup(p, &fast, path_of(from, true) & path_of(to, true), &p->dst, p->dport))
		return VERDICT_NEXT;
	if (fast_pass(skb, p, &fast))
		return drop(skb, REASON_NOT_WRITTEN);
	return into_container(skb, p, to, &p->dst, p->dport);
}

/*
 * From a container to the outside. to_uplink translates, as it does with what the
 * stack sends. Where the next hop's address is not known, the stack looks for it,
 * and says so to the sender if there is none; but a connection that it does not
 * follow any more stays ours.
 */
static __noinline int fast_out(struct __sk_buff *skb, const struct packet *p,
			       const struct endpoint *from)
{
	struct next_hop next;
	struct fast fast;
	long result;

	fast.c.owners = from->owner;
	if (skb->pkt_type != PACKET_HOST ||
	    !fast_lookup(p, &fast, path_of(from, false), &p->dst, p->dport))
		return VERDICT_NEXT;
	result = fib_next_hop(skb, p, skb->ifindex, segment_length(skb, p), &next);
	if (result != BPF_FIB_LKUP_RET_SUCCESS &&
	    (result != BPF_FIB_LKUP_RET_NO_NEIGH || p->protocol != IPPROTO_TCP || p->tcp_syn))
		return VERDICT_NEXT;
	if (fast.offload ? fast.offload->uplink != next.ifindex : !is_uplink(next.ifindex))
		return VERDICT_NEXT;
	if (fast_pass(skb, p, &fast))
		return drop(skb, REASON_NOT_WRITTEN);
	skb->tc_index = TAG_PAST;
	return bpf_redirect_neigh(next.ifindex, &next.neigh, sizeof(next.neigh), 0);
}

/* The stack would believe p's source: it is routed to, and neither the host's nor a container's. */
static __noinline bool is_from_outside(struct __sk_buff *skb, const struct packet *p)
{
	return !bpf_map_lookup_elem(&endpoints, &p->src) && fib_forwards(fib_ask(skb, p, &p->src));
}

/*
 * From the outside to a container, to whose addr:port p is going to be translated.
 * Returns whether it goes past the stack, and is ready for that.
 */
static __noinline bool fast_in(struct __sk_buff *skb, const struct packet *p,
			       const struct endpoint *to, const struct addr *addr, __u16 port)
{
	struct fast fast;

	fast.c.owners = to->owner;
	if (segment_length(skb, p) > to->mtu ||
	    !fast_lookup(p, &fast, path_of(to, false), addr, port))
		return false;
	if (fast.offload ? fast.offload->uplink != skb->ifindex : !is_from_outside(skb, p))
		return false;
	return !fast_pass(skb, p, &fast);
}

/* The host would send p by the way that the stack has sent it, so fast_out will as well. */
static __always_inline bool leads_to(struct __sk_buff *skb, const struct packet *p, __u32 uplink)
{
	struct next_hop next;

	return !fib_next_hop(skb, p, skb->ingress_ifindex, segment_length(skb, p), &next) &&
	       next.ifindex == uplink;
}

/*
 * The stack has forwarded p, which is at the egress of a container's device or of an
 * uplink. Returns whether it is a shadow, which has served its purpose now.
 */
static __noinline bool stack_forwards(struct __sk_buff *skb, const struct packet *p)
{
	struct connection c = {};
	struct endpoint *from, *to;
	struct offload *offload;
	__u8 path = FAST_ALWAYS;

	if (!offload_possible(p))
		return false;
	from = bpf_map_lookup_elem(&endpoints, &p->src);
	to = bpf_map_lookup_elem(&endpoints, &p->dst);
	if (from) {
		if (from->ifindex != skb->ingress_ifindex)
			return false; /* not from its own device: somebody else says that it is the sender */
		path &= path_of(from, to);
		c.owners ^= from->owner;
	} else {
		c.uplink = skb->ingress_ifindex;
	}
	if (to) {
		path &= path_of(to, from);
		c.owners ^= to->owner;
	} else {
		c.uplink = skb->ifindex;
	}
	if (path != FAST_ESTABLISHED) /* and not for no endpoint */
		return false;
	if (c.uplink && !is_uplink(c.uplink))
		return false; /* a client of a host port here, or a bridge of somebody else */
	connect(&c, p, &p->dst, p->dport);
	offload = offload_find(&c.key);
	if (offload && is_shadow(offload, p, c.side)) {
		if (!(offload->state & OFFLOAD_BOTH))
			bpf_map_delete_elem(&offload_tcp, &c.key);
		return true;
	}
	if (offload_seen(p, &c, offload) &&
	    (to ? to->ifindex == skb->ifindex : leads_to(skb, p, c.uplink)))
		offload_begin(p, &c, offload);
	return false;
}
