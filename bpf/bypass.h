/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Forwarding past the stack: into a container by bpf_redirect_peer, to the
 * outside by the routing table and bpf_redirect_neigh. The stack does everything else
 * that a router does: errors to the sender, IP options, fragments.
 */
#pragma once

#include "conntrack.h"
#include "endpoint.h"
#include "fib.h"
#include "fwd_cache.h"
#include "offload.h"
#include "policy_send.h"
#include "port_mark.h"
#include "route_cache.h"
#include "tag.h"
#include "verdict.h"

/*
 * Reports whether the host's rules translate the connection of c, looked up by offload_find under its tuple before or after
 * translation.
 */
static __always_inline bool bypass_is_translated(const struct connection *c)
{
	struct flow_args *args = flow_scratch_get();

	if (c->offload)
		return c->offload->translated;
	if (!config.sees_hooks || !args || !flow_may_have(args, FLOW_CT_NAT))
		return false;
	args->key = c->key;
	args->key.kind = FLOW_CT_NAT;
	return flow_lookup(args);
}

/* The same for the connection of the packet in pkt_scratch, if it may bypass the stack. */
__noinline int bypass_knows_translated(void)
{
	struct packet *p = pkt_scratch_get();
	struct connection c = {};

	if (!p || !offload_is_possible(p) || p->decided.ct_update || p->ttl <= 1 || p->tcp_syn ||
	    p->tcp_synack)
		return false;
	offload_init(&c, p, &p->dst, p->dport);
	offload_find(&c);
	return bypass_is_translated(&c);
}

/* Reports whether only the stack may handle p, because its connection is new. */
static __always_inline bool bypass_is_early(const struct packet *p)
{
	return p->decided.fast_path == FAST_PATH_ESTABLISHED && fwd_cache_is_new(p);
}

/*
 * Reports whether p, addressed to addr:port, may bypass the stack, unchanged. c has the owners, and
 * gets the connection's entry; FAST_PATH_ALWAYS needs none.
 */
static __noinline bool bypass_is_allowed(struct packet *p, struct connection *c, __u8 fast_path,
					 const struct addr *addr, __u16 port)
{
	c->offload = NULL;
	if (!p->fast_eligible || p->decided.ct_update || p->ttl <= 1 ||
	    fast_path == FAST_PATH_NEVER)
		return false;
	if (fast_path == FAST_PATH_ALWAYS)
		return true;
	if (!offload_is_possible(p) || p->tcp_syn || p->tcp_synack)
		return false;
	offload_init(c, p, addr, port);
	offload_find(c);
	p->decided.ct_nat = bypass_is_translated(c);
	return !p->decided.ct_nat && offload_allows(p, c);
}

/* Updates the connection's entry and the TTL of a packet that bypasses the stack. */
static __always_inline long bypass_prepare(struct __sk_buff *skb, struct packet *p,
					   struct connection *c)
{
	return offload_track_bypass(skb, p, c) ?: decrement_ttl(skb, p);
}

/*
 * Redirects p to the container, and stores the decision and p's new destination in the
 * forwarding cache; flags and flow_kind are those of the entry.
 */
static __noinline int redirect_to_endpoint(struct __sk_buff *skb, const struct packet *p,
					   const struct endpoint *to, __u8 flags, __u8 flow_kind)
{
	if (fwd_cacheable(p) &&
	    (!fwd_changes_state(p) || flags & FWD_EVERY_TCP || fwd_opens_tracked(p, flow_kind)))
		fwd_cache_store_ingress(skb, flags, flow_kind);
	/* mac and host_mac: destination and source, as in a frame. */
	if (bpf_skb_store_bytes(skb, 0, to->mac, 2 * ETH_ALEN, 0))
		return drop(skb, REASON_REWRITE);
	return bpf_redirect_peer(to->ifindex, 0);
}

/*
 * Restricts the fast path of a container's connections. The queue of a shaped device must see every
 * packet. device is the host end of the container's veth, or NULL.
 */
static __always_inline __u8 bypass_fast_path(__u8 fast_path, const struct device *device)
{
	return device && device->flags & DEVICE_SHAPED ? FAST_PATH_NEVER : fast_path;
}

/*
 * Restricts the fast path of a container's connections with the outside. If the host has rules
 * that bpf_fib_lookup does not follow, the stack routes the first packets.
 */
static __always_inline __u8 bypass_fast_path_outside(__u8 fast_path, const struct packet *p,
						     const struct device *device)
{
	fast_path = bypass_fast_path(fast_path, device);
	return fast_path == FAST_PATH_ALWAYS && route_has_rules(p->ipv6) ? FAST_PATH_ESTABLISHED
									 : fast_path;
}

/* Reports whether p fits the container's veth. If not, it voids the cached decision. */
static __always_inline bool bypass_fits(struct __sk_buff *skb, const struct packet *p,
					const struct endpoint *to)
{
	if (packet_segment_len(skb, p) <= to->mtu)
		return true;
	fwd_cache_remove(p);
	return false;
}

/* From one container to another. VERDICT_NEXT: by the stack. */
static __noinline int bypass_to_endpoint(struct __sk_buff *skb, struct packet *p,
					 const struct device *sender, const struct endpoint *from,
					 const struct endpoint *to)
{
	struct device *receiver = device_lookup(to->ifindex);
	struct connection c;
	__u8 fast_path;
	bool unrecorded;

	if (!bypass_fits(skb, p, to) || skb->pkt_type != PACKET_HOST)
		return VERDICT_NEXT;
	offload_set_ends(&c, from, to, 0);
	fast_path = bypass_fast_path(p->decided.fast_path, sender) &
		    bypass_fast_path(p->decided.fast_path, receiver);
	if (!bypass_is_allowed(p, &c, fast_path, &p->dst, p->dport))
		return VERDICT_NEXT;
	p->decided.parsed = true;
	if (!p->decided.paired && ((sender && sender->policy) || (receiver && receiver->policy)) &&
	    !policy_admits(skb, skb->ifindex, to->ifindex, TAG_NONE))
		return VERDICT_DROP;
	unrecorded = !c.offload; /* the end of the connection removes it */
	if (bypass_prepare(skb, p, &c))
		return drop(skb, REASON_REWRITE);
	packet_translate(p, &p->dst, p->dport);
	/* Without an entry and rules, no state of a connection between containers is recorded. */
	return redirect_to_endpoint(
		skb, p, to,
		unrecorded && (p->decided.paired || !p->decided.policies) ? FWD_EVERY_TCP : 0,
		unrecorded && p->decided.paired ? FLOW_PAIR : 0);
}

/*
 * Reports whether p, which from_container lets bypass the stack, may do so at c's uplink, which may have hooks.
 */
static __noinline bool bypass_uplink_allows(struct __sk_buff *skb, struct packet *p,
					    struct connection *c, __u8 fast_path)
{
	if (c->offload || !(fast_path & FAST_PATH_AUTO_BIT) ||
	    fast_path_now(skb, FAST_PATH_AUTO, c->uplink) == FAST_PATH_ALWAYS)
		return true;
	return bypass_is_allowed(p, c, FAST_PATH_ESTABLISHED, &p->dst, p->dport);
}

/* Sends the packet to the next hop. to_uplink sees it at once, unless the neighbor's address is unknown. */
static __always_inline int bypass_send(struct __sk_buff *skb, struct next_hop *next)
{
	if (next->tunnel)
		return node_redirect(skb, (const struct addr *)next->neigh.ipv6_nh);
	return bpf_redirect_neigh(next->ifindex, &next->neigh, sizeof(next->neigh), 0);
}

/*
 * Reports whether p, which device's container sends past the stack, keeps its source: it goes to a container of another node, and
 * neither flow nor rule has a say in it. So to_uplink need not see it.
 */
static __always_inline bool bypass_keeps_source(const struct packet *p, const struct device *device)
{
	return node_any() && device && !device->policy &&
	       !port_may_be_marked(PORT_REPLIES, p->protocol, p->sport) && node_lookup(&p->dst);
}

/*
 * From a container to the outside. VERDICT_NEXT: by the stack. to_uplink translates
 * the packet either way, unless it keeps its source. If the next hop's MAC address is unknown, the stack
 * resolves it, and sends an ICMP error if that fails; but an established TCP connection cannot return to it.
 */
static __noinline int bypass_to_uplink(struct __sk_buff *skb, struct packet *p,
				       const struct device *device, const struct endpoint *from)
{
	struct ct_translation *t = ct_scratch_get();
	struct connection c;
	bool unrecorded;
	long result;

	if (!t)
		return VERDICT_NEXT;
	offload_set_ends(&c, from, NULL, 0);
	if (skb->pkt_type != PACKET_HOST ||
	    !bypass_is_allowed(p, &c, bypass_fast_path_outside(p->decided.fast_path, p, device),
			       &p->dst, p->dport))
		return VERDICT_NEXT;
	result = fib_next_hop(skb, p, skb->ifindex, packet_segment_len(skb, p), &t->next);
	if (result == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		fwd_cache_remove(p);
	if (result != BPF_FIB_LKUP_RET_SUCCESS &&
	    (result != BPF_FIB_LKUP_RET_NO_NEIGH || p->protocol != IPPROTO_TCP || p->tcp_syn))
		return VERDICT_NEXT;
	c.uplink = t->next.ifindex;
	if (!bypass_uplink_allows(skb, p, &c, from->fast_path))
		return VERDICT_NEXT;
	if (!is_uplink(c.uplink))
		return VERDICT_NEXT;
	if (c.offload && c.offload->uplink != c.uplink)
		return offload_move(skb, p, &c);
	unrecorded = !c.offload; /* the end of the connection removes it */
	if (bypass_prepare(skb, p, &c))
		return drop(skb, REASON_REWRITE);
	if (unrecorded && bypass_keeps_source(p, device)) {
		if (result == BPF_FIB_LKUP_RET_SUCCESS)
			fwd_cache_store_next_hop(skb, p, &t->next);
		skb->tc_index = TAG_TRANSLATED;
		return bypass_send(skb, &t->next);
	}
	t->in = *packet_tuple(p);
	t->out = t->in;
	t->sent = result == BPF_FIB_LKUP_RET_SUCCESS;
	skb->tc_index = (p->decided.uncached ? TAG_BYPASS_ONCE : TAG_BYPASS) |
			(c.offload ? TAG_OBSERVE : 0) | tag_judged(p);
	return bypass_send(skb, &t->next);
}

/*
 * From the outside to the container at addr:port. VERDICT_NEXT: by the stack. The
 * caller translates the packet either way.
 */
static __noinline int bypass_from_uplink(struct __sk_buff *skb, struct packet *p,
					 const struct endpoint *to, const struct addr *addr,
					 __u16 port)
{
	struct connection c;
	bool unrecorded;

	offload_set_ends(&c, NULL, to, skb->ifindex);
	if (bypass_is_early(p) || !bypass_fits(skb, p, to) ||
	    !bypass_is_allowed(
		    p, &c,
		    bypass_fast_path_outside(p->decided.fast_path, p, device_lookup(to->ifindex)),
		    addr, port))
		return VERDICT_NEXT;
	if ((!c.offload || c.offload->uplink != c.uplink) && !route_ask(skb, ROUTE_REVERSE))
		return VERDICT_NEXT;
	if (c.offload && c.offload->uplink != c.uplink)
		return offload_move(skb, p, &c);
	unrecorded = !c.offload;
	if (bypass_prepare(skb, p, &c))
		return drop(skb, REASON_REWRITE);
	packet_translate(p, addr, port);
	return redirect_to_endpoint(skb, p, to,
				    unrecorded && p->decided.stack_cacheable && !p->decided.policies
					    ? FWD_EVERY_TCP
					    : 0,
				    packet_is_translated(p) ? p->decided.flow_kind : 0);
}

/*
 * Returns the tag for the packet in pkt_scratch, which goes through the stack. TAG_OBSERVE
 * has its delivery recorded for the offload: the connection has sent more packets than
 * OFFLOAD_AFTER, has bypassed the stack before, or begins anew.
 */
__noinline int bypass_tag(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct connection c;
	bool observe;
	__u32 id, tag;

	if (!p)
		return TAG_NONE;
	if (p->decided.ct_update)
		return TAG_CT_UPDATE;
	id = id_of(&p->src, p->sport, &p->decided.new_addr, p->decided.new_port, p->protocol,
		   p->ipv6);
	tag = tag_of(id) | tag_judged(p);
	fwd_record_stack(id);
	if (!offload_is_possible(p))
		return tag;
	if (p->decided.fast_path == FAST_PATH_ALWAYS)
		return tag | TAG_OBSERVE;
	if (p->tcp_syn || p->tcp_synack) {
		offload_init(&c, p, &p->decided.new_addr, p->decided.new_port);
		offload_find(&c);
		if (c.offload) {
			fwd_cache_remove(p);
			return tag | TAG_OBSERVE;
		}
	}
	observe = fwd_cache_count(skb, p, id, p->decided.fast_path ? OFFLOAD_AFTER : FWD_NO_LIMIT);
	packet_to_stack(p, &p->decided.new_addr, p->decided.new_port, id);
	return observe && !p->tcp_syn && !p->tcp_synack ? tag | TAG_OBSERVE : tag;
}

/* Leaves p to the stack, which sees the destination addr:port. */
static __always_inline int bypass_none(struct __sk_buff *skb, struct packet *p,
				       const struct addr *addr, __u16 port)
{
	packet_translate(p, addr, port);
	skb->tc_index = bypass_tag(skb);
	return VERDICT_NEXT;
}

/* Sets c's key and side to those of the connection in ct_scratch after translation. */
static __always_inline void bypass_init_ct(struct connection *c, const struct ct_translation *t)
{
	const struct fwd_key *tuple = t->reply ? &t->in : &t->out;

	c->side = offload_key(&c->key, tuple, &tuple->dst, tuple->dport);
	c->ct = t->ct;
}

/* The same, and c's owner: one of a container whose address the key has. Returns false if there is none. */
static __always_inline bool bypass_init_translated(struct connection *c)
{
	struct ct_translation *t = ct_scratch_get();
	struct endpoint *endpoint;

	if (!t)
		return false;
	bypass_init_ct(c, t);
	endpoint = endpoint_lookup(&c->key.remote) ?: endpoint_lookup(&c->key.local);
	if (!endpoint)
		return false;
	c->owner = endpoint->owner;
	return true;
}

/*
 * Sets c for p, which the stack has forwarded from one endpoint to the other; NULL
 * is the outside. Returns false if the connection cannot be offloaded.
 */
static __always_inline bool bypass_init_observed(struct __sk_buff *skb, const struct packet *p,
						 const struct endpoint *from,
						 const struct endpoint *to, struct connection *c)
{
	__u8 now = fast_path_between(from ? from->fast_path : FAST_PATH_ALWAYS,
				     to ? to->fast_path : FAST_PATH_ALWAYS);
	__u32 ingress = skb->ingress_ifindex;
	__u8 fast_path;

	now = fast_path_now(skb, now, ingress);
	fast_path = now;
	if (from) {
		if (from->ifindex != ingress)
			return false; /* another device uses the container's address */
		fast_path &= to ? bypass_fast_path(now, device_lookup(from->ifindex))
				: bypass_fast_path_outside(now, p, device_lookup(from->ifindex));
	}
	if (to) {
		fast_path &= from ? bypass_fast_path(now, device_lookup(to->ifindex))
				  : bypass_fast_path_outside(now, p, device_lookup(to->ifindex));
	}
	offload_set_ends(c, from, to, from ? skb->ifindex : ingress);
	/* Clients usually have the higher port. */
	c->owner = from && (!to || p->sport > p->dport) ? from->owner : to ? to->owner : 0;
	/* FAST_PATH_ALWAYS needs no entry. It is also the value if both are NULL. */
	if (fast_path != FAST_PATH_ESTABLISHED)
		return false;
	if (c->uplink && !is_uplink(c->uplink))
		return false; /* a hairpin client, or another plugin's bridge */
	if (p->decided.ct_nat)
		return bypass_init_translated(c);
	offload_init(c, p, &p->dst, p->dport);
	return true;
}

/*
 * Reports whether the stack has delivered a UDP packet of the other side before. If it was a
 * container's, it must have left by the route that the fast path would take. Where the stack delivers one side's
 * packets, they have the inverse of the other side's tuple where it receives them.
 */
static __always_inline bool bypass_is_replied(struct __sk_buff *skb, const struct packet *p,
					      const struct connection *c)
{
	const struct ct_translation *t = ct_scratch_get();
	const struct fwd_key *tuple = c->ct && t ? &t->in : packet_tuple(p);
	__u32 tick;
	__u16 hop;

	if (p->protocol != IPPROTO_UDP || c->offload->state & OFFLOAD_DELIVERED << !c->side ||
	    !tuple_reply_is_delivered(tuple, c->ct, &hop, &tick) ||
	    offload_is_void(p, c, c->uplink, tick))
		return false;
	return !c->uplink || p->ifindex == c->uplink ||
	       fib_routes_reply_to(skb, tuple, c->uplink, hop);
}

/*
 * Leaves a hint about the first TCP packet of its side that counts: once both sides have one, the connection may be
 * offloaded, and no CPU may take it for new (fwd_entry_is_new).
 */
static __always_inline void bypass_hint_delivery(const struct packet *p, const struct connection *c,
						 bool by_container)
{
	const struct ct_translation *t = ct_scratch_get();

	if (p->protocol == IPPROTO_TCP && t)
		tuple_hint_begin(c->ct ? tuple_id(&t->in) : p->id,
				 by_container ? p->ack : packet_seq_end(p));
}

/*
 * Records p, which the stack has forwarded from one endpoint to the other, unchanged (NULL is the outside), so that its
 * connection can be offloaded. Returns 1 if it now can be, 0 if not, -1 if p does not show it.
 */
static __noinline int bypass_observe(struct __sk_buff *skb, const struct packet *p,
				     const struct endpoint *from, const struct endpoint *to)
{
	struct connection c = {};

	if (!offload_is_possible(p) || !bypass_init_observed(skb, p, from, to, &c))
		return -1;
	offload_find(&c);
	if (c.offload && (c.offload->translated ? c.offload->ct != c.ct : c.ct != 0)) {
		if (!from && !c.ct)
			return -1;  /* forged, perhaps: conntrack does not know it */
		offload_remove(&c); /* of another connection with the tuple */
	}
	if (c.offload && offload_is_void(p, &c, c.offload->uplink, c.offload->ct_seen))
		offload_remove(&c);
	if (p->tcp_syn || p->tcp_synack) {
		if (c.offload)
			offload_track_open(p, &c);
	} else if (p->tcp_rst) {
		if (c.offload && (from || p->seq == c.offload->ct_acked[c.side & 1]))
			offload_remove(&c); /* another number may be forged */
	} else if (offload_matches(&c) && c.offload->state & OFFLOAD_DELIVERED << c.side) {
		if (bypass_is_replied(skb, p, &c))
			offload_deliver(&c, !c.side);
		offload_touch(p, &c, from);
	} else if (to ? to->ifindex == skb->ifindex : fib_routes_to(skb, p, c.uplink)) {
		offload_begin(p, &c, from);
		bypass_hint_delivery(p, &c, from);
	}
	offload_save(skb, &c);
	return offload_is_open(c.offload);
}

/* Reports whether the stack has not changed p: tag_is_of, without chance matches if the delivery is recorded. */
static __always_inline bool bypass_is_unchanged(struct __sk_buff *skb, const struct packet *p,
						__u32 tag)
{
	return tag_is_of(tag, p->id) && !(tag & TAG_OBSERVE && ct_translates(skb));
}

/*
 * Handles p, which the endpoint sends to the outside: if the stack has not changed it, the delivery is
 * recorded as its tag says.
 */
static __noinline void bypass_forwarded(struct __sk_buff *skb, const struct packet *p, __u32 tag,
					const struct endpoint *from)
{
	tag = offload_tag_delivered(p, tag);
	if (!bypass_is_unchanged(skb, p, tag))
		return;
	if (tag & TAG_OBSERVE)
		bypass_observe(skb, p, from, NULL);
	else
		tuple_hint_delivery(p, fib_hop_of_frame(skb), false);
}
