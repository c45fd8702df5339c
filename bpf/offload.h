/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Connections that may bypass the stack: it has delivered packets of both sides
 * unchanged, so its rules accept them and do not translate them. So that conntrack does not
 * forget them, the stack gets UDP packets and conntrack updates (README.md, Offload). A FIN or
 * RST has an update only if its own numbers are right.
 */
#pragma once

#include "bytes.h"
#include "endpoint.h"
#include "offload_flow.h"
#include "route_cache.h"
#include "stack_hooks.h"
#include "tag.h"
#include "tuple_hint.h"

#define OFFLOAD_AFTER	  8	    /* packets of a side: shorter connections get no entry */
#define CT_TCP_INTERVAL	  TICKS(60) /* after 5 days, unless the host configures less */
#define OFFLOAD_MOVES	  8	    /* to other uplinks: more are no changes of routes */
#define CT_UPDATE_MAX_LEN 1024	    /* bytes: copy only short packets */

/* Reports whether what was recorded of the connection at the tick is void. */
static __always_inline bool offload_is_void(const struct packet *p, const struct connection *c,
					    __u32 uplink, __u32 tick)
{
	struct stack_note *note =
		stack_note_lookup(devices_hash(c->device, c->other ?: uplink), p->ipv6);

	return note && note->bypassed && (__s32)(tick - note->bypassed) <= 0;
}

static __always_inline bool offload_is_possible(const struct packet *p)
{
	return p->fast_eligible && is_tcp_or_udp(p->protocol);
}

/*
 * Returns the tag of p, which the stack has delivered: the last hook records the delivery, too, if another CPU has recorded one of
 * the same side since p's ingress hook. So the offload begins with all that conntrack has seen.
 */
static __always_inline __u32 offload_tag_delivered(const struct packet *p, __u32 tag)
{
	bool begun =
		p->protocol == IPPROTO_TCP && tag_is_of(tag, p->id) && tuple_hint_exists(p->id);

	return begun ? tag | TAG_OBSERVE : tag;
}

#define CT_UPDATE_RESERVED 0x0e /* in byte 12 of the TCP header: 0 in other packets */

/* Reports whether p is a conntrack update, which ends at the last hook: only ct_update_send sets reserved bits. */
static __always_inline bool is_ct_update(struct __sk_buff *skb, const struct packet *p, __u32 tag)
{
	__u8 *reserved;

	if (tag != TAG_CT_UPDATE || p->protocol != IPPROTO_TCP)
		return false;
	reserved = bytes_at(skb, p->l4 + 12, 1);
	return reserved && *reserved & CT_UPDATE_RESERVED;
}

/* Moves a sequence number forward to the other one. Returns false if that is not ahead. */
static __always_inline bool seq_advance(__u32 *seq, __u32 to)
{
	if ((__s32)(to - *seq) <= 0)
		return false;
	*seq = to;
	return true;
}

/* Reports whether the packet, at an ingress hook, comes from the outside. */
static __always_inline bool offload_by_remote(const struct __sk_buff *skb,
					      const struct connection *c)
{
	return skb->ifindex == c->uplink;
}

/* The sequence number that conntrack expects of a packet's sender next, as the container says. */
static __always_inline __u32 ct_next_seq(const struct __sk_buff *skb, const struct connection *c)
{
	__u32 side = c->side & 1;

	return offload_by_remote(skb, c) ? c->offload->ct_acked[side]
					 : c->offload->ct_ack[side ^ 1];
}

/*
 * Reports whether conntrack awaits that p's side acknowledges data. Otherwise it would forget the
 * connection in minutes.
 */
static __always_inline bool ct_awaits_ack(const struct connection *c)
{
	__u32 side = c->side & 1;

	return (__s32)(c->offload->ct_ack[side] - c->offload->ct_acked[side ^ 1]) > 0;
}

/* The fields of a TCP header from offset 4 on. */
struct tcp_fields {
	__be32 seq;
	__be32 ack;
	__be32 flags; /* and the header's length, and the window */
};

#define CT_UPDATE_FLAGS 0x5e100000 /* these, ACK, and a header without options (SACK) */
#define TCP_FIN		0x00010000
#define TCP_RST		0x00040000

static __noinline long tcp_rewrite_fields(struct __sk_buff *skb, const struct packet *p,
					  const struct tcp_fields *from,
					  const struct tcp_fields *to)
{
	__s64 diff = bpf_csum_diff((__be32 *)from, sizeof(*from), (__be32 *)to, sizeof(*to), 0);

	return bpf_l4_csum_replace(skb, p->l4 + offsetof(struct tcphdr, check), 0, diff, 0)
		       ?: bpf_skb_store_bytes(skb, p->l4 + offsetof(struct tcphdr, seq), to,
					      sizeof(*to), 0);
}

/*
 * Sends the stack a copy of p that conntrack takes for a retransmission of the data before seq, the last that it
 * has seen. Its window is never that of the last one: equal packets shorten the timeout.
 */
static __noinline long ct_update_send(struct __sk_buff *skb, const struct packet *p,
				      const struct connection *c, __u32 seq)
{
	__u32 len = p->len + p->l3 - p->l4 - sizeof(struct tcphdr), flags = CT_UPDATE_FLAGS;
	struct offload *offload = c->offload;
	struct tcp_fields own, update = {.ack = bpf_htonl(offload->ct_acked[!(c->side & 1)])};
	long err = bpf_skb_load_bytes(skb, p->l4 + 4, &own, sizeof(own));

	if (err)
		return err;
	offload->ct_window = offload->ct_window == 1 ? 2 : 1;
	if (p->tcp_rst)
		flags |= TCP_RST, len = 0;
	else if (p->tcp_fin)
		flags |= TCP_FIN;
	update.seq = bpf_htonl(seq - len);
	update.flags = bpf_htonl(flags | offload->ct_window);
	err = tcp_rewrite_fields(skb, p, &own, &update);
	if (!err) {
		skb->tc_index = TAG_CT_UPDATE;
		bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
		skb->tc_index = TAG_NONE;
	}
	return err ?: tcp_rewrite_fields(skb, p, &update, &own);
}

/* Tracks FINs and their ACKs. Removes the flow when both FINs are acknowledged. */
static __always_inline void offload_track_close(const struct packet *p, struct connection *c)
{
	struct offload *offload = c->offload;

	if (p->tcp_fin) {
		offload->fin_seq[c->side & 1] = packet_seq_end(p);
		offload->state |= OFFLOAD_FIN << c->side;
	}
	if (offload->state & OFFLOAD_FIN << !c->side && p->ack == offload->fin_seq[!(c->side & 1)])
		offload->state |= OFFLOAD_FIN_ACK << !c->side;
	if ((offload->state & OFFLOAD_FIN_ACK_BOTH) == OFFLOAD_FIN_ACK_BOTH)
		offload_remove(c);
}

/* Reports whether p may bypass the stack. */
static __always_inline bool offload_allows(const struct packet *p, const struct connection *c)
{
	const struct offload *offload = c->offload;

	if (!offload || offload->payer != c->owners ||
	    offload_is_void(p, c, offload->uplink, offload->ct_seen) ||
	    (offload->state & OFFLOAD_DELIVERED_BOTH) != OFFLOAD_DELIVERED_BOTH)
		return false;
	return p->protocol != IPPROTO_UDP || now_ticks() - offload->ct_seen <= CT_UDP_INTERVAL;
}

/*
 * Reports whether p, a RST or FIN, ends the connection: it is a container's, or has the
 * expected number.
 */
static __always_inline bool offload_end_counts(struct __sk_buff *skb, const struct packet *p,
					       const struct connection *c)
{
	return !offload_by_remote(skb, c) || p->decided.end_expected ||
	       p->seq == ct_next_seq(skb, c);
}

/* Reports whether conntrack needs an update, and records what the update acknowledges. */
static __always_inline bool ct_update_is_due(const struct packet *p, const struct connection *c,
					     __u32 now)
{
	__u32 side = c->side & 1, end = c->offload->ct_ack[side];

	if (ct_awaits_ack(c) && (__s32)(p->ack - end) >= 0) {
		c->offload->ct_acked[side ^ 1] = end;
		return true;
	}
	return now - c->offload->ct_seen > CT_TCP_INTERVAL && p->len <= CT_UPDATE_MAX_LEN;
}

/*
 * Records that p's side bypasses the stack: conntrack has its data up to p, even if the delivery was not recorded.
 * Reports whether p is the first to. Then it has an update: if another CPU has just sent data past the stack, too, conntrack does not
 * have all data up to p, but has to expect ACKs of it.
 */
static __always_inline bool ct_record_bypass(struct __sk_buff *skb, const struct packet *p,
					     const struct connection *c)
{
	__u32 side = c->side & 1, *end = &c->offload->ct_ack[side ^ 1];

	if (!c->offload->slow[side] || (__s32)(p->seq - *end) < 0) /* a retransmission */
		return false;
	*end = p->seq;
	c->offload->slow[side] = false;
	/* A cached decision, which leaves hints, may come later. */
	tuple_hint_write(p->id, offload_by_remote(skb, c) ? packet_seq_end(p) : p->ack);
	return true;
}

/*
 * Reports whether conntrack may still await data or an ACK. Meanwhile packets are decided in full, for at most a
 * second: a remote's may be forged.
 */
static __always_inline bool ct_may_await(const struct connection *c, __u32 now)
{
	return now - c->offload->ct_seen <= 1 &&
	       (ct_awaits_ack(c) || c->offload->slow[0] || c->offload->slow[1]);
}

/*
 * Updates the entry of p, which bypasses the stack, and conntrack if it is due. Returns 0 or
 * an error.
 */
static __noinline long offload_track_bypass(struct __sk_buff *skb, struct packet *p,
					    struct connection *c)
{
	struct offload *offload = c->offload;
	bool due, first, end = p->tcp_fin || p->tcp_rst;
	__u32 now;

	if (!offload || p->protocol != IPPROTO_TCP)
		return 0;
	now = now_ticks();
	due = end ? offload_end_counts(skb, p, c) : ct_update_is_due(p, c, now);
	first = (due || !end) && ct_record_bypass(skb, p, c);
	if (due || first) {
		offload->ct_seen = now;
		if (ct_update_send(skb, p, c, first ? p->seq : ct_next_seq(skb, c)))
			return -EINVAL;
	}
	p->decided.uncached |= ct_may_await(c, now);
	if (p->tcp_fin || offload->state & OFFLOAD_FIN_BOTH)
		offload_track_close(p, c);
	if (p->tcp_rst && !offload_by_remote(skb, c))
		offload_remove(c);
	else if (p->tcp_rst && due) /* forged, perhaps, and ignored by the container */
		offload->state |= OFFLOAD_FIN_BOTH | OFFLOAD_FIN_ACK;
	offload_save(skb, c);
	return 0;
}

/* Removes the entry of the former connection when a SYN and its reply start a new one. */
static __always_inline void offload_track_open(const struct packet *p, struct connection *c)
{
	if (p->tcp_syn)
		c->offload->state |= OFFLOAD_SYN << c->side;
	else if (c->offload->state & OFFLOAD_SYN << !c->side)
		offload_remove(c);
}

static __always_inline bool offload_matches(const struct connection *c)
{
	return c->offload && c->offload->payer == c->owners && c->offload->uplink == c->uplink;
}

/*
 * Records the numbers of p, which the side has sent and the stack delivered: conntrack has seen
 * them. A remote's packet may be forged, and conntrack lets numbers before its window pass
 * (Linux 6.1), so its data counts once the container acknowledges it.
 */
static __always_inline void ct_record(struct offload *offload, const struct packet *p, __u32 side,
				      bool by_container)
{
	__u32 other = side ^ 1, delivered = offload->state & OFFLOAD_DELIVERED_BOTH;
	bool first = !(delivered & OFFLOAD_DELIVERED << side);

	if (first && (by_container || !delivered))
		offload->ct_ack[other] = p->seq - 1;
	if (seq_advance(&offload->ct_ack[other], packet_seq_end(p)))
		offload->slow[side] = true;
	if (!by_container)
		return;
	if (first)
		offload->ct_acked[side] = p->seq - 1;
	if (!delivered)
		offload->ct_ack[side] = p->ack;
	seq_advance(&offload->ct_ack[side], p->ack);
	offload->ct_acked[other] = p->ack;
}

/* Records p, which the stack has delivered, in its connection's entry. */
static __always_inline void offload_touch(const struct packet *p, struct connection *c,
					  bool by_container)
{
	c->offload->ct_seen = now_ticks();
	ct_record(c->offload, p, c->side & 1, by_container);
	if (p->tcp_fin || c->offload->state & OFFLOAD_FIN_BOTH)
		offload_track_close(p, c);
}

/* The same for the first packet of its side. Begins the flow, unless the other side has. */
static __always_inline void offload_begin(const struct packet *p, struct connection *c,
					  bool by_container)
{
	struct offload_copy *copy = offload_scratch_get();

	if (!copy)
		return;
	if (!offload_matches(c)) {
		__builtin_memset(copy, 0, sizeof(*copy));
		copy->now.owner = c->owner;
		/* Which container has opened it is unknown, so the two have an account of their own. */
		copy->now.payer = c->owners;
		copy->now.translated = c->ct != 0;
		copy->now.ct = c->ct;
		copy->now.uplink = c->uplink;
		copy->now.flow_state = p->protocol == IPPROTO_TCP ? FLOW_SYN_SENT : FLOW_UDP;
		c->offload = &copy->now;
	}
	offload_touch(p, c, by_container);
	if (c->offload)
		offload_deliver(c, c->side);
}

/*
 * Handles p, whose connection is offloaded by another uplink than c's: the host's routes have changed. TCP cannot return to the
 * stack, because conntrack has not seen its sequence numbers. So the stack gets a conntrack update in its place. If rules let that pass,
 * the last hook moves the offload (offload_moved), and a retransmission of p bypasses the stack.
 */
static __always_inline int offload_move(struct __sk_buff *skb, struct packet *p,
					struct connection *c)
{
	if (p->protocol != IPPROTO_TCP || c->offload->moves >= OFFLOAD_MOVES ||
	    route_has_rules(p->ipv6) || offload_is_void(p, c, c->uplink, c->offload->ct_seen))
		return VERDICT_NEXT;
	p->tcp_fin = false;
	p->tcp_rst = false;
	if (ct_update_send(skb, p, c, ct_next_seq(skb, c)))
		return drop(skb, REASON_REWRITE);
	offload_save(skb, c);
	return end_uncounted();
}

/* Moves the offload of the conntrack update in pkt_scratch, which the stack has let pass, to the uplink. */
__noinline int offload_moved(struct __sk_buff *skb, __u32 uplink)
{
	struct packet *p = pkt_scratch_get();
	struct connection c = {};

	if (!p || !is_uplink(uplink))
		return 0;
	offload_init(&c, p, &p->dst, p->dport);
	offload_find(&c);
	if (!c.offload || !c.offload->uplink || c.offload->uplink == uplink)
		return 0;
	c.offload->uplink = uplink;
	c.offload->moves++;
	offload_save(skb, &c);
	return 0;
}
