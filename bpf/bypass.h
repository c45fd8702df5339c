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
#include "fwd_cache.h"

/* A connection that may go past the stack, and by what. */
struct bypass {
	struct connection c;
	struct offload *offload; /* NULL: fastPath is always */
};

/* Whether the connection of p with addr:port may go past the stack. Its owners are known. */
static __noinline bool offload_lookup(const struct packet *p, struct bypass *fast, __u8 path,
				      const struct addr *addr, __u16 port)
{
	fast->offload = NULL;
	if (!p->fast_eligible || p->ttl <= 1 || path == FAST_PATH_NEVER)
		return false;
	if (path == FAST_PATH_ALWAYS)
		return true;
	offload_key_init(&fast->c, p, addr, port);
	fast->offload = offload_get(p, &fast->c);
	return fast->offload;
}

/* p goes: what is to be done to it, whichever way it takes. */
static __always_inline long bypass_prepare(struct __sk_buff *skb, const struct packet *p,
					   const struct bypass *fast)
{
	long err = fast->offload ? offload_pass(skb, p, &fast->c, fast->offload) : 0;

	return err ?: decrement_ttl(skb, p);
}

/* Gives p, whose headers are done, to the container; and those after it, with addr:port as their destination. */
static __noinline int redirect_to_endpoint(struct __sk_buff *skb, const struct packet *p,
					   const struct endpoint *to, const struct addr *addr,
					   __u16 port)
{
	struct fwd_entry way = {
		.ifindex = to->ifindex,
		.nat_side = SIDE_DST,
		.nat_addr = *addr,
		.nat_port = port,
		.nat = port != p->dport || !addr_equal(addr, &p->dst),
	};

	/* They stand in one piece there. */
	__builtin_memcpy(&way.next_hop, to->mac, sizeof(to->mac) + sizeof(to->host_mac));
	fwd_cache_store(skb, p, (const struct fwd_key *)p, &way);
	if (bpf_skb_store_bytes(skb, 0, &way.next_hop, 2 * ETH_ALEN, 0))
		return drop(skb, REASON_REWRITE);
	return bpf_redirect_peer(to->ifindex, 0);
}

/* p leaves past the stack as from addr:port; those after it need not come by here. */
static __noinline void fwd_cache_store_egress(struct __sk_buff *skb, const struct packet *p,
					      const struct addr *addr, __u16 port)
{
	struct fwd_key key = *(const struct fwd_key *)p;
	struct fwd_entry way = {
		.ifindex = skb->ifindex,
		.nat_side = SIDE_SRC,
		.nat_addr = *addr,
		.nat_port = port,
		.nat = port != p->sport || !addr_equal(addr, &p->src),
	};
	struct next_hop next;

	key.ifindex = skb->ingress_ifindex;
	if (fib_next_hop(skb, p, key.ifindex, segment_length(skb, p), &next) ||
	    next.ifindex != skb->ifindex)
		return;
	way.family = next.neigh.nh_family;
	__builtin_memcpy(&way.next_hop, next.neigh.ipv6_nh, sizeof(way.next_hop));
	fwd_cache_store(skb, p, &key, &way);
}

/*
 * The client in key asks another address than before, which its packets and the answers
 * must not go the short way for any more. p came in by an uplink.
 */
static __noinline void fwd_cache_forget(const struct flow_key *key, const struct packet *p,
					const struct flow *before)
{
	struct endpoint *to = bpf_map_lookup_elem(&endpoints, &key->local);
	struct fwd_key way = *(const struct fwd_key *)p;

	way.dst = before->nat_addr;
	way.dport = before->nat_port;
	bpf_map_delete_elem(&fwd_cache, &way);
	if (!to)
		return;
	way.src = key->local;
	way.dst = key->remote;
	way.sport = key->local_port;
	way.dport = key->remote_port;
	way.ifindex = to->ifindex;
	bpf_map_delete_elem(&fwd_cache, &way);
}

/*
 * The way that a container has to others, or to the outside: what its queue holds
 * to a rate has to go by it. Where it takes packets from some containers only, the
 * stack has to bring the first of each connection, by to_container.
 */
static __always_inline __u8 fast_path_of(const struct endpoint *endpoint, bool to_others)
{
	struct device *device = bpf_map_lookup_elem(&devices, &endpoint->ifindex);

	if (device && device->flags & DEVICE_SHAPED)
		return FAST_PATH_NEVER;
	if (device && to_others && device->ingress_policy != POLICY_OPEN)
		return endpoint->fast_path & FAST_PATH_ESTABLISHED;
	return endpoint->fast_path;
}

/* From one container to another. */
static __noinline int bypass_to_endpoint(struct __sk_buff *skb, const struct packet *p,
					 const struct endpoint *from, const struct endpoint *to)
{
	struct bypass fast;

	fast.c.owners = from->owner ^ to->owner;
	if (skb->pkt_type != PACKET_HOST || segment_length(skb, p) > to->mtu ||
	    !offload_lookup(p, &fast, fast_path_of(from, true) & fast_path_of(to, true), &p->dst,
			    p->dport))
		return VERDICT_NEXT;
	if (bypass_prepare(skb, p, &fast))
		return drop(skb, REASON_REWRITE);
	return redirect_to_endpoint(skb, p, to, &p->dst, p->dport);
}

/*
 * From a container to the outside. to_uplink translates, as it does with what the
 * stack sends. Where the next hop's address is not known, the stack looks for it,
 * and says so to the sender if there is none; but a connection that it does not
 * follow any more stays ours.
 */
static __noinline int bypass_to_uplink(struct __sk_buff *skb, const struct packet *p,
				       const struct endpoint *from)
{
	struct next_hop next;
	struct bypass fast;
	long result;

	fast.c.owners = from->owner;
	if (skb->pkt_type != PACKET_HOST ||
	    !offload_lookup(p, &fast, fast_path_of(from, false), &p->dst, p->dport))
		return VERDICT_NEXT;
	result = fib_next_hop(skb, p, skb->ifindex, segment_length(skb, p), &next);
	if (result != BPF_FIB_LKUP_RET_SUCCESS &&
	    (result != BPF_FIB_LKUP_RET_NO_NEIGH || p->protocol != IPPROTO_TCP || p->tcp_syn))
		return VERDICT_NEXT;
	if (fast.offload ? fast.offload->uplink != next.ifindex : !is_uplink(next.ifindex))
		return VERDICT_NEXT;
	if (bypass_prepare(skb, p, &fast))
		return drop(skb, REASON_REWRITE);
	skb->tc_index = TAG_BYPASS;
	return bpf_redirect_neigh(next.ifindex, &next.neigh, sizeof(next.neigh), 0);
}

/* The stack would believe p's source: it is routed to, and neither the host's nor a container's. */
static __noinline bool is_from_outside(struct __sk_buff *skb, const struct packet *p)
{
	return !bpf_map_lookup_elem(&endpoints, &p->src) &&
	       fib_forwards(fib_lookup(skb, p, &p->src));
}

/*
 * From the outside to a container, to whose addr:port p is going to be translated.
 * Returns whether it goes past the stack, and is ready for that.
 */
static __noinline bool bypass_from_uplink(struct __sk_buff *skb, const struct packet *p,
					  const struct endpoint *to, const struct addr *addr,
					  __u16 port)
{
	struct bypass fast;

	fast.c.owners = to->owner;
	if (segment_length(skb, p) > to->mtu ||
	    !offload_lookup(p, &fast, fast_path_of(to, false), addr, port))
		return false;
	if (fast.offload ? fast.offload->uplink != skb->ifindex : !is_from_outside(skb, p))
		return false;
	return !bypass_prepare(skb, p, &fast);
}

/* The host would send p by the way that the stack has sent it, so fast_out will as well. */
static __always_inline bool fib_leaves_by(struct __sk_buff *skb, const struct packet *p,
					  __u32 uplink)
{
	struct next_hop next;

	return !fib_next_hop(skb, p, skb->ingress_ifindex, segment_length(skb, p), &next) &&
	       next.ifindex == uplink;
}

/*
 * The stack has forwarded p, which is at the egress of a container's device or of an
 * uplink. Returns whether it is a shadow, which has served its purpose now.
 */
static __noinline bool offload_track(struct __sk_buff *skb, const struct packet *p)
{
	struct connection c = {};
	struct endpoint *from, *to;
	struct offload *offload;
	__u8 path = FAST_PATH_ALWAYS;

	if (!offload_possible(p))
		return false;
	from = bpf_map_lookup_elem(&endpoints, &p->src);
	to = bpf_map_lookup_elem(&endpoints, &p->dst);
	if (from) {
		if (from->ifindex != skb->ingress_ifindex)
			return false; /* not from its own device: somebody else says that it is the sender */
		path &= fast_path_of(from, to);
		c.owners ^= from->owner;
	} else {
		c.uplink = skb->ingress_ifindex;
	}
	if (to) {
		path &= fast_path_of(to, from);
		c.owners ^= to->owner;
	} else {
		c.uplink = skb->ifindex;
	}
	if (path != FAST_PATH_ESTABLISHED) /* and not for no endpoint */
		return false;
	if (c.uplink && !is_uplink(c.uplink))
		return false; /* a client of a host port here, or a bridge of somebody else */
	offload_key_init(&c, p, &p->dst, p->dport);
	offload = offload_find(&c.key);
	if (offload && is_ct_update(offload, p, c.side)) {
		if (!(offload->state & OFFLOAD_DELIVERED_BOTH))
			bpf_map_delete_elem(&offload_tcp, &c.key);
		return true;
	}
	if (offload_update(p, &c, offload) &&
	    (to ? to->ifindex == skb->ifindex : fib_leaves_by(skb, p, c.uplink)))
		offload_delivered(p, &c, offload);
	return false;
}
