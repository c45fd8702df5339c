/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Connections that may go past the stack. It has delivered packets of both sides
 * as they were sent, so it translates nothing of them and its rules let them
 * pass. New connections are its business, and conntrack is to know of those that
 * it does not see any more:
 *
 * - UDP goes through the stack again every few seconds, sooner than conntrack forgets.
 * - TCP must not: conntrack would find its numbers out of the window, and rules that
 *   drop what is invalid would end it. Instead the stack gets a copy, a shadow, of
 *   what ends the connection, and of a packet per minute, with numbers that it has
 *   seen before. What forwards to the receiver drops it again.
 */
#pragma once

#include "checksum.h"
#include "flow.h"
#include "maps.h"
#include "parse.h"
#include "fwd_cache.h"

#define CT_UDP_INTERVAL	       TICKS(5)	 /* conntrack's least is 30 s */
#define CT_TCP_INTERVAL	       TICKS(60) /* and 5 days, or what the host has instead */
#define CT_UPDATE_MAX_LEN      1024	 /* a packet per minute, but a short one */
#define OFFLOAD_FIN_ANY	       (OFFLOAD_FIN | OFFLOAD_FIN << 1)
#define OFFLOAD_CLOSED	       (OFFLOAD_FIN_ACK | OFFLOAD_FIN_ACK << 1)
#define OFFLOAD_DELIVERED_BOTH (OFFLOAD_DELIVERED | OFFLOAD_DELIVERED << 1)

static __always_inline bool addr_before(const struct addr *a, const struct addr *b)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)b;

	for (int i = 3; i > 0; i--)
		if (x[i] != y[i])
			return x[i] < y[i];
	return x[0] < y[0];
}

/* The connection of a packet, in the terms of the maps. */
struct connection {
	struct offload_key key;
	__u32 side; /* that p comes from */
	__u32 uplink;
	__u64 owners;
};

/* Whether the sender's side is the first. Ports nearly always decide. */
static __always_inline bool offload_is_first(const struct packet *p, const struct addr *addr,
					     __u16 port)
{
	return p->sport != port ? p->sport < port : addr_before(&p->src, addr);
}

/* Fills in p's connection with addr:port, but for owners and uplink. */
static __noinline void offload_key_init(struct connection *c, const struct packet *p,
					const struct addr *addr, __u16 port)
{
	__builtin_memset(&c->key, 0, sizeof(c->key));
	c->key.protocol = p->protocol;
	if (offload_is_first(p, addr, port)) {
		c->side = 0;
		c->key.addr[0] = p->src;
		c->key.port[0] = p->sport;
		c->key.addr[1] = *addr;
		c->key.port[1] = port;
	} else {
		c->side = 1;
		c->key.addr[0] = *addr;
		c->key.port[0] = port;
		c->key.addr[1] = p->src;
		c->key.port[1] = p->sport;
	}
}

static __always_inline struct offload *offload_find(const struct offload_key *key)
{
	return key->protocol == IPPROTO_TCP ? bpf_map_lookup_elem(&offload_tcp, key)
					    : bpf_map_lookup_elem(&offload_udp, key);
}

static __always_inline bool offload_possible(const struct packet *p)
{
	return p->fast_eligible && !p->icmp_error &&
	       (p->protocol == IPPROTO_TCP || p->protocol == IPPROTO_UDP);
}

static __always_inline __u32 ct_seq_of(const struct offload *offload, __u32 side)
{
	return side ? offload->ct_seq[1] : offload->ct_seq[0];
}

/* No sender goes back behind both of these numbers. */
static __always_inline bool is_ct_update(const struct offload *offload, const struct packet *p,
					 __u32 side)
{
	return p->protocol == IPPROTO_TCP && p->seq == ct_seq_of(offload, side) - 1 &&
	       p->ack == ct_seq_of(offload, !side) - 1;
}

struct tcp_fields {
	__be32 seq;
	__be32 ack;
	__be16 flags; /* and the header's length */
};

#define TCP_LENGTH 0xf000
#define TCP_FIN	   0x01
#define TCP_ACK	   0x10

static __always_inline long tcp_put(struct __sk_buff *skb, const struct packet *p, __u32 offset,
				    __u32 from, __u32 to, __u32 size)
{
	return bpf_l4_csum_replace(skb, p->l4 + offsetof(struct tcphdr, check), from, to, size)
		       ?: bpf_skb_store_bytes(skb, p->l4 + offset, &to, size, 0);
}

static __noinline long tcp_put_fields(struct __sk_buff *skb, const struct packet *p,
				      const struct tcp_fields *from, const struct tcp_fields *to)
{
	return tcp_put(skb, p, offsetof(struct tcphdr, seq), from->seq, to->seq, 4)
		       ?: tcp_put(skb, p, offsetof(struct tcphdr, ack_seq), from->ack, to->ack, 4)
		       ?: tcp_put(skb, p, 12, from->flags, to->flags, 2);
}

/*
 * Sends the stack a copy of p that conntrack finds in the window. One that ends
 * the connection does so there, by FIN, since the number of an RST would have to
 * be exact.
 */
static __noinline long send_ct_update(struct __sk_buff *skb, const struct packet *p,
				      const struct offload *offload, __u32 side)
{
	struct tcp_fields own = {.seq = bpf_htonl(p->seq), .ack = bpf_htonl(p->ack)};
	struct tcp_fields ct_update = {
		.seq = bpf_htonl(ct_seq_of(offload, side) - 1),
		.ack = bpf_htonl(ct_seq_of(offload, !side) - 1),
	};
	long err = bpf_skb_load_bytes(skb, p->l4 + 12, &own.flags, sizeof(own.flags));

	if (err)
		return err;
	ct_update.flags = (own.flags & bpf_htons(TCP_LENGTH)) | bpf_htons(TCP_ACK);
	if (p->tcp_fin || p->tcp_rst)
		ct_update.flags |= bpf_htons(TCP_FIN);
	err = tcp_put_fields(skb, p, &own, &ct_update);
	if (!err) {
		skb->tc_index = TAG_CT_UPDATE;
		bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
		skb->tc_index = TAG_NONE;
	}
	return err ?: tcp_put_fields(skb, p, &ct_update, &own);
}

/* Follows the end of a connection: it is over when both sides have acknowledged the other's FIN. */
static __always_inline void offload_closing(const struct packet *p, const struct connection *c,
					    struct offload *offload)
{
	__u32 length = p->len + p->l3 - p->l4_payload; /* of what p carries */

	if (p->tcp_fin) {
		if (c->side)
			offload->fin_seq[1] = p->seq + length + 1;
		else
			offload->fin_seq[0] = p->seq + length + 1;
		offload->state |= OFFLOAD_FIN << c->side;
	}
	if (offload->state & OFFLOAD_FIN << !c->side &&
	    p->ack == (c->side ? offload->fin_seq[0] : offload->fin_seq[1]))
		offload->state |= OFFLOAD_FIN_ACK << !c->side;
	if ((offload->state & OFFLOAD_CLOSED) == OFFLOAD_CLOSED)
		bpf_map_delete_elem(&offload_tcp, &c->key);
}

/* The entry by which p may go past the stack, or NULL. */
static __noinline struct offload *offload_get(const struct packet *p, const struct connection *c)
{
	struct offload *offload;

	if (!offload_possible(p) || p->tcp_syn || p->tcp_synack)
		return NULL;
	offload = offload_find(&c->key);
	if (!offload || offload->owners != c->owners ||
	    (offload->state & OFFLOAD_DELIVERED_BOTH) != OFFLOAD_DELIVERED_BOTH ||
	    is_ct_update(offload, p, c->side))
		return NULL;
	if (p->protocol == IPPROTO_UDP && now_ticks() - offload->ct_seen > CT_UDP_INTERVAL)
		return NULL;
	return offload;
}

/* p goes past the stack, which is told of what it must know. */
static __noinline long offload_pass(struct __sk_buff *skb, const struct packet *p,
				    const struct connection *c, struct offload *offload)
{
	__u32 now;

	if (p->protocol != IPPROTO_TCP)
		return 0;
	now = now_ticks();
	if (p->tcp_fin || p->tcp_rst ||
	    (now - offload->ct_seen > CT_TCP_INTERVAL && p->len <= CT_UPDATE_MAX_LEN)) {
		offload->ct_seen = now;
		if (send_ct_update(skb, p, offload, c->side))
			return -EINVAL;
	}
	if (p->tcp_fin || offload->state & OFFLOAD_FIN_ANY)
		offload_closing(p, c, offload);
	/* Anybody outside can send an RST that its receiver ignores; a container's own is meant. */
	if (p->tcp_rst && skb->ifindex != offload->uplink)
		offload->state &= ~OFFLOAD_DELIVERED_BOTH;
	return 0;
}

/* Who opens a connection anew is answered: nothing of the old one holds any more. */
static __always_inline void offload_opening(const struct packet *p, const struct connection *c,
					    struct offload *offload)
{
	if (p->tcp_syn)
		offload->state |= OFFLOAD_SYN << c->side;
	else if (offload->state & OFFLOAD_SYN << !c->side)
		bpf_map_delete_elem(&offload_tcp, &c->key);
}

static __always_inline bool offload_is(const struct offload *offload, const struct connection *c)
{
	return offload && offload->owners == c->owners && offload->uplink == c->uplink;
}

/*
 * The stack delivers p, which is no shadow. Returns whether that is the first of
 * its side, and so for offload_begin.
 */
static __noinline bool offload_update(const struct packet *p, const struct connection *c,
				      struct offload *offload)
{
	__u32 now = now_ticks();

	if (p->tcp_syn || p->tcp_synack) {
		if (offload)
			offload_opening(p, c, offload);
		return false;
	}
	if (p->tcp_rst) {
		bpf_map_delete_elem(&offload_tcp, &c->key);
		return false;
	}
	if (!offload_is(offload, c) || !(offload->state & OFFLOAD_DELIVERED << c->side))
		return true;
	if (offload->ct_seen != now)
		offload->ct_seen = now;
	if (p->tcp_fin || offload->state & OFFLOAD_FIN_ANY)
		offload_closing(p, c, offload);
	return false;
}

/* Notes that the stack has delivered p, beside what known says of the other side. */
static __noinline void offload_delivered(const struct packet *p, const struct connection *c,
					 const struct offload *known)
{
	struct offload offload = {.owners = c->owners, .uplink = c->uplink};

	if (offload_is(known, c))
		offload = *known;
	if (c->side)
		offload.ct_seq[1] = p->seq;
	else
		offload.ct_seq[0] = p->seq;
	offload.state |= OFFLOAD_DELIVERED << c->side;
	offload.ct_seen = now_ticks();
	if (p->protocol == IPPROTO_TCP)
		bpf_map_update_elem(&offload_tcp, &c->key, &offload, BPF_ANY);
	else
		bpf_map_update_elem(&offload_udp, &c->key, &offload, BPF_ANY);
}
