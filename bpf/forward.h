/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translates a packet and forwards it. */
#pragma once

#include "bypass.h"
#include "dnat.h"
#include "flow.h"
#include "gateway.h"
#include "host_port.h"
#include "masq.h"
#include "tag.h"

/*
 * Updates the flow that flow_access has found by p, received from an uplink or a container under the
 * address of the flow's remote, unless it has done so. Packets that arrive on a device other than the
 * route's are ignored, because the stack may drop them (rp_filter).
 */
static __noinline void flow_track_received(struct __sk_buff *skb, struct packet *p)
{
	struct flow_args *args = flow_scratch_get();
	const struct flow_key *key;
	const struct flow *flow;
	bool snat;

	if (!args || args->tracked || p->icmp_error || p->decided.ct_update)
		return;
	key = &args->key;
	flow = &args->flow;
	snat = key->kind == FLOW_SNAT;
	if (flow->uplink && flow->uplink != p->ifindex && !route_ask(skb, ROUTE_REVERSE))
		return;
	if (p->tcp_rst || p->tcp_fin) {
		packet_translate(p, snat ? &flow->nat_addr : &key->local,
				 snat ? flow->nat_port : key->local_port);
		p->decided.end_expected = tuple_end_expected(flow->ack, flow->remote_end);
	}
	flow_track(FROM_REMOTE);
}

/*
 * Reports whether the container's rules admit p from the outside, as far as can be known here; if not, drops it. A flow tells
 * this hook, not to_container, who opened the connection. A refused packet without a flow may be translated back: then ct_nat.h
 * or to_container judges it.
 */
static __always_inline bool forward_is_admitted(struct __sk_buff *skb, struct packet *p,
						const struct endpoint *to)
{
	bool admitted;

	if (!(policy_checks() & POLICY_CHECK_ANY) ||
	    (!p->decided.flow_kind &&
	     (!p->fast_eligible || p->decided.fast_path == FAST_PATH_NEVER)))
		return true;
	admitted = policy_receives_outside(skb, to->ifindex);
	p->decided.judged_later &= !admitted;
	if (p->decided.judged_later)
		p->decided.ct_nat = bypass_knows_translated();
	return admitted || p->decided.judged_later;
}

/*
 * Gives p, received from the outside, the destination addr:port: that of the
 * container to, or the host's if to is NULL. Bypasses the stack if possible. addr is &p->dst: p keeps its destination.
 */
static __noinline int forward_dnat(struct __sk_buff *skb, struct packet *p, struct endpoint *to,
				   const struct addr *addr, __u16 port)
{
	int verdict = VERDICT_NEXT;

	p->decided.fast_path =
		to ? fast_path_now(skb, to->fast_path, to->ifindex) : FAST_PATH_NEVER;
	if (to && to->route_set)
		verdict = gateway_deliver(skb, p, to);
	packet_translate(p, addr, port);
	if (to && verdict == VERDICT_NEXT && !forward_is_admitted(skb, p, to))
		return VERDICT_DROP;
	if (to && p->l3 && verdict == VERDICT_NEXT && !p->decided.judged_later)
		verdict = bypass_from_uplink(skb, p, to, addr, port);
	if (verdict != VERDICT_DROP && addr != &p->dst && rewrite_side(skb, SIDE_DST))
		return drop(skb, REASON_REWRITE);
	if (verdict != VERDICT_NEXT)
		return verdict;
	/* So that rules and conntrack see what the container sees (br_netfilter). */
	if (p->l3 && !p->decided.ct_update && (port != p->dport || !addr_equal(addr, &p->dst)) &&
	    is_bridge(skb->ifindex)) {
		skb->tc_index = TAG_REENTRY;
		skb->cb[0] = reentry_of(p, addr, p->decided.admitted);
		return bpf_redirect(skb->ifindex, BPF_F_INGRESS);
	}
	return bypass_none(skb, p, addr, port);
}

/* Forwards p if it is a reply of a masqueraded flow: to the container, or the host. */
static __noinline int forward_masq_reply(struct __sk_buff *skb, struct packet *p)
{
	struct endpoint *to;
	struct flow *flow;
	struct addr addr;

	flow = masq_lookup_reply(skb, p, FLOW_RECEIVED);
	if (!flow)
		return NOT_HANDLED;
	to = endpoint_lookup(&flow->nat_addr);
	if (flow->owner != (to ? to->owner : OWNER_HOST))
		return NOT_HANDLED;
	if (packet_opens(p))
		return flow_ended(flow) ? NOT_HANDLED : VERDICT_NEXT;
	flow_track_received(skb, p);
	p->decided.flow_kind = FLOW_SNAT;
	addr = flow->nat_addr; /* the flow is gone with the next lookup */
	return forward_dnat(skb, p, to, &addr, flow->nat_port);
}

/*
 * Gives p, which leaves for the outside, the source addr:port. VXLAN must not get an address of the
 * host: other nodes would accept it as this node's.
 */
static __noinline int forward_snat(struct __sk_buff *skb, struct packet *p, const struct addr *addr,
				   __u16 port)
{
	struct endpoint *from;

	if (node_is_tunnel_port(p) && !addr_equal(addr, &p->src)) {
		from = endpoint_lookup(&p->src);
		return from ? drop_for(skb, from->owner, REASON_TUNNEL) : drop(skb, REASON_TUNNEL);
	}
	packet_translate(p, addr, port);
	if (p->decided.bypass)
		fwd_cache_store_egress(skb);
	else if (p->decided.flow_kind && !p->decided.remapped)
		fwd_cache_record_source(skb, p);
	if (rewrite_side(skb, SIDE_SRC))
		return drop(skb, REASON_REWRITE);
	return VERDICT_NEXT;
}

/* Gives p, a container's reply, the source that the flow's client used as destination. */
static __noinline int forward_reply(struct __sk_buff *skb, struct packet *p,
				    const struct flow *flow)
{
	if (dnat_set_client(skb, p, SIDE_DST, flow->remote_port))
		return drop(skb, REASON_REWRITE);
	p->decided.flow_kind = FLOW_DNAT;
	return forward_snat(skb, p, &flow->nat_addr, flow->nat_port);
}

/* Reports whether a masqueraded flow or the host has the tuple of p, sent from addr:port. */
static __noinline bool host_port_is_taken(const struct packet *p, const struct addr *addr,
					  __u16 port)
{
	struct flow_args *args = flow_scratch_get();
	struct flow *flow;

	if (!args)
		return true;
	flow_sent_key(&args->key, packet_tuple(p), FLOW_SNAT);
	args->key.local = *addr;
	args->key.local_port = port;
	flow = flow_lookup(args);
	return flow && !flow_expired(flow) && !flow_ended(flow);
}

/*
 * Sends p, a reply of a host port whose flow was lost, with the host port as its
 * source, and restores the flow. A host port on any address replies from the
 * one that the host would choose.
 */
static __noinline int host_port_reply(struct __sk_buff *skb, struct packet *p,
				      const struct host_port *port)
{
	struct addr source = port->target_addr;

	if (addr_is_any(&source, p->ipv6) &&
	    !fib_source(skb, packet_tuple(p), skb->ifindex, &source))
		return drop_for(skb, port->owner, REASON_NO_SOURCE);
	if (host_port_is_taken(p, &source, port->target_port))
		return NOT_HANDLED;
	if (!p->icmp_error && !flow_store_reply(p, &source, port->target_port, port->owner))
		return drop_for(skb, port->owner, REASON_NO_PORT);
	return forward_snat(skb, p, &source, port->target_port);
}

/* Forwards p, from the outside, to the container at addr:port, whose flow is in d. */
static __always_inline int forward_flow(struct __sk_buff *skb, struct packet *p,
					struct endpoint *to, struct dnat *d)
{
	if (dnat_set_client(skb, p, SIDE_SRC, d->key.remote_port))
		return drop(skb, REASON_REWRITE);
	p->decided.flow_kind = FLOW_DNAT;
	return forward_dnat(skb, p, to, &d->key.local, d->key.local_port);
}

/*
 * Creates the flow of p, which has the tag of fwd_tag_pending and which the stack has
 * delivered. If the stack has changed p's source, replies get the original one as destination.
 */
static __noinline void forward_track_pending(struct __sk_buff *skb, struct packet *p, __u32 tag,
					     const struct endpoint *to)
{
	__u32 key = tag % ROUTED_TUPLES, ingress = packet_ingress(skb, p);
	struct routed *entry = bpf_map_lookup_elem(&routed, &key);
	const struct fwd_key *tuple;
	struct dnat d;

	if (!entry || !tag_is_of(tag, entry->id))
		return;
	tuple = &entry->tuple;
	if (tuple->protocol != p->protocol || tuple->dport != p->dport ||
	    !addr_equal(&tuple->dst, &p->dst) ||
	    (tuple->ifindex != ingress && ingress != INGRESS_UNKNOWN) ||
	    device_lookup(tuple->ifindex)) /* a container's: policy_track_pending */
		return;
	dnat_init(&d, tuple, &tuple->dst, tuple->dport);
	if (dnat_find(tuple, &d, to->owner, packet_opens(p)) || d.key.remote_port != tuple->sport)
		return;
	dnat_create(p, tuple, &d, to->owner);
}

/*
 * Forwards p to the container that it is addressed to. The sender has a route to
 * the container and expects replies from its address. If replies would be translated, an
 * entry prevents it. It is created when the stack has delivered p (forward_track_pending), or
 * when p bypasses it. Replies to another node's container are translated only from a port
 * behind a host port.
 */
static __noinline int forward_to_endpoint(struct __sk_buff *skb, struct packet *p,
					  struct endpoint *to)
{
	enum origin origin = node_origin(&p->src, p->ifindex);
	struct dnat d;
	int verdict;

	if (origin == ORIGIN_FORGED)
		return drop(skb, REASON_NODE);
	if (p->icmp_error)
		return gateway_deliver(skb, p, to);
	if (origin == ORIGIN_NODE && !host_port_reverse(&p->dst, p->dport, p->protocol)) {
		p->decided.stack_cacheable = !to->route_set;
		return forward_dnat(skb, p, to, &p->dst, p->dport);
	}
	dnat_init(&d, packet_tuple(p), &p->dst, p->dport);
	dnat_receive(true);
	if (dnat_find(packet_tuple(p), &d, to->owner, packet_opens(p))) {
		flow_track_received(skb, p);
		return forward_flow(skb, p, to, &d);
	}
	if (d.key.remote_port != p->sport) { /* a host port's flow of the same client */
		if (dnat_create(p, packet_tuple(p), &d, to->owner))
			return drop_for(skb, to->owner, REASON_NO_PORT);
		return forward_flow(skb, p, to, &d);
	}
	if (!d.free)
		return drop_for(skb, to->owner, REASON_NO_PORT);
	verdict = forward_dnat(skb, p, to, &p->dst, p->dport);
	if (!(to->flags & ENDPOINT_MASQ) && !host_port_reverse(&p->dst, p->dport, p->protocol))
		return verdict;
	if (p->decided.ct_update)
		return verdict;
	if (verdict == VERDICT_NEXT)
		fwd_tag_pending(skb, p, PENDING_JUDGE, 0);
	else if (verdict != VERDICT_DROP)
		dnat_create(p, packet_tuple(p), &d, to->owner);
	return verdict;
}
