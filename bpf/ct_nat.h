/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Connections that the host's own rules translate, for example kube-proxy's services. Once the stack has delivered packets of
 * both sides, a FLOW_CT_NAT is found by the tuple before translation, and a FLOW_OFFLOAD by the tuple after it. Whenever a packet
 * is decided in full, conntrack's entry is read. If it is gone, closed, or not the same connection with the same translation, the
 * stack decides again.
 */
#pragma once

#include "bypass.h"
#include "conntrack.h"
#include "policy_send.h"
#include "port_mark.h"

#define CT_NAT_RENEW TICKS(30) /* of the time in the entry; UDP_STREAM's idle time is longer */

/* Finds the FLOW_CT_NAT of the connection with the tuple before translation, in one of both directions. */
static __always_inline struct ct_nat *ct_nat_lookup(const struct fwd_key *tuple)
{
	struct flow_args *args = flow_scratch_get();

	if (!args)
		return NULL;
	offload_key(&args->key, tuple, &tuple->dst, tuple->dport);
	args->key.kind = FLOW_CT_NAT;
	return (struct ct_nat *)flow_lookup(args);
}

/* Reports whether the flow still says what conntrack does. */
static __always_inline bool ct_nat_is_current(const struct ct_nat *nat,
					      const struct ct_translation *t)
{
	const struct addr *addr = t->reply ? &t->in.src : &t->out.dst;

	return nat && nat->ct == t->ct &&
	       nat->nat_port == (t->reply ? t->in.sport : t->out.dport) &&
	       addr_equal(&nat->nat_addr, addr);
}

/*
 * Finds the flows of the packet in pkt_scratch, and sets ct_scratch to its translation, and offload_scratch.
 * Returns false if the connection is not known, or not any more.
 */
__noinline int ct_nat_find(void)
{
	struct ct_translation *t = ct_scratch_get();
	struct flow_args *flows = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct ct_nat *nat;
	struct connection c = {};

	if (!t || !flows || !p)
		return false;
	t->sent = false;
	offload_init(&c, p, &p->dst, p->dport);
	offload_find(&c);
	if (c.offload && c.offload->translated) {
		t->ct = c.offload->ct;
		if (!ct_read(true)) {
			offload_remove(&c);
			return false;
		}
		/* Or the opener of another connection uses its backend's address and this port. */
		if (ct_tuple_equal(&t->in, packet_tuple(p)))
			return ct_nat_is_current(ct_nat_lookup(&t->out), t);
	}
	nat = ct_nat_lookup(packet_tuple(p));
	if (!nat)
		return false;
	t->ct = nat->ct;
	if (!ct_read(false)) {
		flow_remove();
		return false;
	}
	if (!ct_tuple_equal(&t->in, packet_tuple(p)) || !ct_nat_is_current(nat, t))
		return false;
	/* The stack sees no more TCP packets. */
	if (now_ticks() - nat->last_seen >= CT_NAT_RENEW) {
		flows->new = flows->flow;
		flows->new.last_seen = now_ticks();
		flow_insert();
	}
	bypass_init_ct(&c, t);
	offload_find(&c);
	return c.offload && c.offload->translated && c.offload->ct == t->ct;
}

/*
 * Reports whether the rules of the container that sends the packet in pkt_scratch, with its tuple after translation,
 * admit it. If not, drops it. Tracks the flow that admits replies, as policy_sends and policy_track_pending do
 * for the stack's packets.
 */
__noinline int ct_nat_sender_admits(struct __sk_buff *skb)
{
	struct policy_args *args = policy_scratch_get();
	struct ct_translation *t = ct_scratch_get();
	struct device *sender = device_lookup(skb->ifindex), *receiver = NULL;
	struct flow_args *flow = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct endpoint *to;

	if (!args || !t || !flow || !p || !sender || !sender->policy ||
	    !policy_load(args, sender, p) || !args->rule_sets)
		return true;
	flow_sent_key(&flow->key, &t->in, FLOW_POLICY);
	p->decided.admitted = policy_is_known(FROM_CONTAINER) && !p->decided.pending;
	if (p->decided.admitted)
		return true;
	p->decided.pending = PENDING_NOT;
	to = endpoint_lookup(&p->dst);
	if (to)
		receiver = device_lookup(to->ifindex);
	if (!policy_leaves(skb, p, sender, receiver, TAG_NONE))
		return false;
	p->decided.admitted = true;
	if (t->reply || !policy_set_peer(args, &p->dst))
		return true;
	flow_sent_key(&flow->key, &t->in, FLOW_POLICY);
	flow_lookup(flow);
	policy_track(FROM_CONTAINER, args->owner);
	return true;
}

/*
 * Reports whether the rules of the containers on both sides admit the packet in pkt_scratch, as the last hook
 * would judge it. If not, drops it.
 */
__noinline int ct_nat_is_admitted(struct __sk_buff *skb)
{
	struct ct_translation *t = ct_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct endpoint *to;
	bool admitted;

	if (!t || !p)
		return true;
	to = endpoint_lookup(&t->out.dst);
	p->decided.parsed = true;
	p->decided.judged_later = false;
	packet_set_tuple(p, &t->out);
	admitted = ct_nat_sender_admits(skb);
	if (admitted && to)
		admitted = policy_admits(skb, skb->ifindex, to->ifindex, TAG_NONE);
	packet_set_tuple(p, &t->in);
	return admitted;
}

/* Reports whether the fast path of both containers allows a bypass; NULL: the outside. */
static __always_inline bool ct_nat_is_fast(const struct endpoint *from, const struct endpoint *to)
{
	__u8 fast_path = FAST_PATH_ESTABLISHED;

	if (from)
		fast_path = bypass_fast_path(from->fast_path, device_lookup(from->ifindex));
	if (to)
		fast_path &= bypass_fast_path(to->fast_path, device_lookup(to->ifindex));
	return fast_path & FAST_PATH_ESTABLISHED;
}

/*
 * Reports whether p may leave by the uplink by which the stack has sent the connection's packets before. p has its tuple
 * as the stack routes it: with the source before translation.
 */
static __always_inline bool ct_nat_leaves(struct __sk_buff *skb, struct packet *p,
					  struct connection *c, struct next_hop *next)
{
	long result = fib_next_hop(skb, p, skb->ifindex, packet_segment_len(skb, p), next);

	if (result != BPF_FIB_LKUP_RET_SUCCESS &&
	    (result != BPF_FIB_LKUP_RET_NO_NEIGH || p->protocol != IPPROTO_TCP))
		return false;
	p->decided.uncached |= result != BPF_FIB_LKUP_RET_SUCCESS;
	c->uplink = next->ifindex;
	return true;
}

/* Translates both sides of p. */
static __always_inline long ct_nat_rewrite(struct __sk_buff *skb, struct packet *p,
					   const struct ct_translation *t)
{
	long err = 0;

	if (t->out.dport != p->dport || !addr_equal(&t->out.dst, &p->dst))
		err = rewrite(skb, p, SIDE_DST, &t->out.dst, t->out.dport);
	if (!err && (t->out.sport != p->sport || !addr_equal(&t->out.src, &p->src)))
		err = rewrite(skb, p, SIDE_SRC, &t->out.src, t->out.sport);
	return err;
}

/* Reports whether p, with its new tuple, ends the connection as its container expects: hints of other CPUs know. */
static __always_inline bool ct_nat_end_expected(struct __sk_buff *skb, const struct packet *p,
						const struct connection *c)
{
	__u32 acked = ct_next_seq(skb, c);

	return (p->tcp_fin || p->tcp_rst) && tuple_end_expected(acked, acked);
}

/* Removes the connection's FLOW_CT_NAT. */
static __always_inline void ct_nat_remove(const struct ct_translation *t)
{
	if (ct_nat_lookup(t->reply ? &t->out : &t->in))
		flow_remove();
}

/*
 * Redirects the packet in pkt_scratch, whose connection is in ct_scratch and offload_scratch, past the stack.
 * VERDICT_NEXT: by the stack.
 */
__noinline int ct_nat_redirect(struct __sk_buff *skb)
{
	struct offload_copy *copy = offload_scratch_get();
	struct ct_translation *t = ct_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct endpoint *from, *to;
	struct connection c = {};
	bool allowed;
	int verdict;

	if (!p || !t || !copy)
		return VERDICT_NEXT;
	bypass_init_ct(&c, t);
	c.offload = &copy->now;
	from = device_lookup(skb->ifindex) ? endpoint_lookup(&t->in.src) : NULL;
	to = endpoint_lookup(&t->out.dst);
	if ((from ? from->ifindex != skb->ifindex : !to) || !ct_nat_is_fast(from, to))
		return VERDICT_NEXT;
	offload_set_ends(&c, from, to, skb->ifindex);
	p->dst = t->out.dst;
	p->dport = t->out.dport;
	allowed = to ? bypass_fits(skb, p, to) : ct_nat_leaves(skb, p, &c, &t->next);
	if (!allowed || c.offload->uplink != c.uplink || !offload_allows(p, &c)) {
		packet_set_tuple(p, &t->in);
		return VERDICT_NEXT;
	}
	packet_translate(p, &t->out.dst, t->out.dport);
	p->src = t->out.src;
	p->sport = t->out.sport;
	if (!from)
		p->decided.end_expected |= ct_nat_end_expected(skb, p, &c);
	packet_set_tuple(p, &t->in);
	if (bypass_prepare(skb, p, &c))
		return drop(skb, REASON_REWRITE);
	if (!offload_is_open(c.offload))
		ct_nat_remove(t);
	p->in_stack = false;
	skb->tc_index = TAG_NONE;
	verdict = to ? redirect_to_endpoint(skb, p, to, 0, 0) : VERDICT_NEXT;
	if (ct_nat_rewrite(skb, p, t))
		return drop(skb, REASON_REWRITE);
	if (to)
		return verdict;
	t->sent = true;
	skb->tc_index =
		(p->decided.uncached ? TAG_BYPASS_ONCE : TAG_BYPASS) | TAG_OBSERVE | tag_judged(p);
	return bypass_send(skb, &t->next);
}

/* Forwards p, whose connection the host's rules translate, past the stack. VERDICT_NEXT: by the stack. */
static __always_inline int ct_nat_forward(struct __sk_buff *skb, const struct packet *p)
{
	if (!p->l3 || p->decided.remapped || skb->pkt_type != PACKET_HOST || !ct_nat_find())
		return VERDICT_NEXT;
	if (policy_checks() & POLICY_CHECK_ANY && !ct_nat_is_admitted(skb))
		return VERDICT_DROP;
	return ct_nat_redirect(skb);
}

/* Creates the FLOW_CT_NAT of the connection in ct_scratch, or renews its time. Without one, the stack translates. */
static __noinline void ct_nat_record(struct __sk_buff *skb, const struct ct_translation *t,
				     const struct endpoint *payer)
{
	struct flow_args *args = flow_scratch_get();
	struct ct_nat *nat = ct_nat_lookup(t->reply ? &t->out : &t->in), *new;

	if (!args)
		return;
	if (nat && ct_nat_is_current(nat, t) && now_ticks() - nat->last_seen < CT_NAT_RENEW)
		return;
	__builtin_memset(&args->new, 0, sizeof(args->new));
	new = (struct ct_nat *)&args->new;
	new->owner = payer->owner;
	new->nat_addr = t->reply ? t->in.src : t->out.dst;
	new->nat_port = t->reply ? t->in.sport : t->out.dport;
	new->state = t->in.protocol == IPPROTO_TCP ? FLOW_ESTABLISHED : FLOW_UDP_STREAM;
	new->last_seen = now_ticks();
	new->created = new->last_seen;
	new->ct = t->ct;
	offload_insert(skb, args);
}

/* Ends the offload of the tuple's former connection, if the stack has delivered a SYN+ACK that opens a new one. */
static __always_inline void ct_nat_begin(const struct ct_translation *t)
{
	struct connection c = {};

	if (!config.sees_hooks || ct_tcp_state(t->ct) != CT_TCP_SYN_RECV)
		return;
	bypass_init_ct(&c, t);
	offload_find(&c);
	if (c.offload)
		offload_remove(&c);
}

/*
 * Records the packet in pkt_scratch, with the tag of its ingress hook, which the stack has translated and
 * delivered to the device: a container's, or an uplink.
 */
__noinline int ct_nat_observe(struct __sk_buff *skb, __u32 tag)
{
	struct ct_translation *t = ct_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct endpoint *from, *to, *payer;
	int open;

	if (!p || !t || !offload_is_possible(p) || p->tcp_syn || !ct_read_packet(skb) ||
	    !tag_is_of(tag, tuple_id(&t->in)))
		return 0;
	if (p->tcp_synack) {
		ct_nat_begin(t);
		return 0;
	}
	from = device_lookup(skb->ingress_ifindex) ? endpoint_lookup(&t->in.src) : NULL;
	to = device_lookup(skb->ifindex) ? endpoint_lookup(&p->dst) : NULL;
	payer = t->reply ? to ?: from : from ?: to;
	if (!payer || (to && to->ifindex != skb->ifindex))
		return 0;
	p->decided.ct_nat = true;
	open = bypass_observe(skb, p, from, to);
	if (open > 0)
		ct_nat_record(skb, t, payer);
	else if (!open)
		ct_nat_remove(t);
	return 0;
}

/*
 * Reports whether the host's rules may send p, from the outside and to none of our addresses, on to a container. Then
 * it has what ct_nat_forward and the tag need.
 */
static __noinline bool ct_nat_receives(struct __sk_buff *skb, struct packet *p)
{
	if (!config.sees_hooks || !p->l3 ||
	    !port_may_be_marked(PORT_TRANSLATED, p->protocol, p->dport))
		return false;
	p->decided.fast_path = FAST_PATH_ESTABLISHED;
	p->decided.ct_nat = bypass_knows_translated();
	return true;
}

/*
 * Learns from the packet in pkt_scratch, which the stack has delivered to a container, that the host's rules send
 * connections to its former port on.
 */
__noinline int ct_nat_learn(struct __sk_buff *skb)
{
	struct ct_translation *t = ct_scratch_get();

	if (t && config.sees_hooks && is_uplink(skb->ingress_ifindex) && ct_read_packet(skb) &&
	    !t->reply)
		port_set_mark(PORT_TRANSLATED, t->in.protocol, t->in.dport);
	return 0;
}

/*
 * Handles p, with the tag of its ingress hook, which the stack has changed and delivered: if its connection may be
 * offloaded, the delivery is recorded as the tag says. hop as in tuple_hint_delivery.
 */
static __always_inline void ct_nat_delivered(struct __sk_buff *skb, const struct packet *p,
					     __u32 tag, __u16 hop)
{
	if (!config.sees_hooks)
		return;
	if (tag & TAG_OBSERVE)
		ct_nat_observe(skb, tag);
	else
		tuple_hint_delivery(p, hop, true);
}
