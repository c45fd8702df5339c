/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Connections that may bypass the stack: it has delivered packets of both sides
 * unchanged, so its rules accept them and do not translate them. The stack
 * still handles new connections, and conntrack must not forget offloaded ones:
 *
 *  - UDP goes through the stack every few seconds, sooner than conntrack forgets.
 *  - TCP cannot do that: conntrack would find the sequence numbers out of its
 *    window, and rules that drop invalid packets would end the connection. So the
 *    stack gets a conntrack update: a copy of a packet, with sequence numbers that
 *    conntrack knows. It is sent once a minute, and for packets that end the
 *    connection if their own numbers are right. The last hook before the receiver
 *    drops it.
 */
#pragma once

#include "checksum.h"
#include "maps.h"
#include "parse.h"
#include "stack_hooks.h"
#include "tag.h"
#include "time.h"
#include "tuple_hint.h"

#define OFFLOAD_AFTER	       8	 /* packets of a side: shorter connections get no entry */
#define CT_TCP_INTERVAL	       TICKS(60) /* after 5 days, unless the host configures less */
#define CT_UPDATE_MAX_LEN      1024	 /* bytes: copy only short packets */
#define OFFLOAD_FIN_ANY	       (OFFLOAD_FIN | OFFLOAD_FIN << 1)
#define OFFLOAD_CLOSED	       (OFFLOAD_FIN_ACK | OFFLOAD_FIN_ACK << 1)
#define OFFLOAD_DELIVERED_BOTH (OFFLOAD_DELIVERED | OFFLOAD_DELIVERED << 1)

/* The connection of a packet p, with its entry in the offload maps. */
struct connection {
	struct offload_key key;
	__u32 side;		 /* which side in key has sent p: 0 or 1 */
	__u32 device;		 /* of the container, or of one */
	__u32 other;		 /* of the other container; 0: the uplink */
	__u32 uplink;		 /* as in struct offload */
	__u64 owners;		 /* as in struct offload */
	struct offload *offload; /* the entry, or NULL */
};

/* Reports whether p's sender is side 0: the one with the lower port, or if equal, address. */
static __always_inline bool offload_is_first(const struct packet *p, const struct addr *addr,
					     __u16 port)
{
	return p->sport != port ? p->sport < port : addr_less(&p->src, addr);
}

/* Sets c's key and side for p, addressed to addr:port. */
static __noinline void offload_init(struct connection *c, const struct packet *p,
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

static __always_inline struct offload *offload_lookup(const struct offload_key *key)
{
	return key->protocol == IPPROTO_TCP ? bpf_map_lookup_elem(&offload_tcp, key)
					    : bpf_map_lookup_elem(&offload_udp, key);
}

static __always_inline struct stack_note *offload_note(const struct packet *p,
						       const struct connection *c, __u32 uplink)
{
	return stack_note_lookup(way_between(c->device, c->other ?: uplink, p->ipv6));
}

/*
 * Records that p bypasses the stack without an entry. Voids what is known of the stack: if its
 * hooks return, it has not seen what was sent meanwhile.
 */
static __always_inline void offload_record_bypass(const struct packet *p,
						  const struct connection *c)
{
	struct stack_note *note = offload_note(p, c, c->uplink);
	__u32 jiffy = bpf_jiffies64();

	if (!note || note->jiffy == jiffy)
		return;
	note->bypassed = now_ticks();
	note->jiffy = jiffy;
}

/* Reports whether what was recorded of the connection at the tick is void. */
static __always_inline bool offload_is_void(const struct packet *p, const struct connection *c,
					    __u32 uplink, __u32 tick)
{
	struct stack_note *note = offload_note(p, c, uplink);

	return note && note->bypassed && (__s32)(tick - note->bypassed) <= 0;
}

static __always_inline bool offload_is_possible(const struct packet *p)
{
	return p->fast_eligible && !p->icmp_error && is_tcp_or_udp(p->protocol);
}

/* A sequence number that conntrack knows of a side, and that the side does not use again. */
static __always_inline __u32 ct_former_seq(const struct connection *c, __u32 side)
{
	return (side ? c->offload->ct_seq[1] : c->offload->ct_seq[0]) - 1;
}

/* The sequence number that conntrack expects of a side next. */
static __always_inline __u32 ct_next_seq(const struct connection *c, __u32 side)
{
	return side ? c->offload->ct_ack[0] : c->offload->ct_ack[1];
}

/* Reports whether p is a conntrack update of c, which has an entry: no other packet has its ACK. */
static __always_inline bool is_ct_update(const struct packet *p, const struct connection *c)
{
	return p->protocol == IPPROTO_TCP && p->ack == ct_former_seq(c, !c->side) &&
	       (p->seq == ct_former_seq(c, c->side) ||
		((p->tcp_fin || p->tcp_rst) && p->seq == ct_next_seq(c, c->side)));
}

struct tcp_fields {
	__be32 seq;
	__be32 ack;
	__be16 flags; /* and the header's length */
};

#define TCP_LENGTH 0xf000
#define TCP_FIN	   0x01
#define TCP_RST	   0x04
#define TCP_ACK	   0x10

static __always_inline long tcp_rewrite_field(struct __sk_buff *skb, const struct packet *p,
					      __u32 offset, __u32 from, __u32 to, __u32 size)
{
	return bpf_l4_csum_replace(skb, p->l4 + offsetof(struct tcphdr, check), from, to, size)
		       ?: bpf_skb_store_bytes(skb, p->l4 + offset, &to, size, 0);
}

static __noinline long tcp_rewrite_fields(struct __sk_buff *skb, const struct packet *p,
					  const struct tcp_fields *from,
					  const struct tcp_fields *to)
{
	return tcp_rewrite_field(skb, p, offsetof(struct tcphdr, seq), from->seq, to->seq, 4)
		       ?: tcp_rewrite_field(skb, p, offsetof(struct tcphdr, ack_seq), from->ack,
					    to->ack, 4)
		       ?: tcp_rewrite_field(skb, p, 12, from->flags, to->flags, 2);
}

/*
 * Sends the stack a copy of p with sequence numbers that conntrack has seen. The end
 * of a connection has the number that conntrack expects.
 */
static __noinline long ct_update_send(struct __sk_buff *skb, const struct packet *p,
				      const struct connection *c)
{
	struct tcp_fields own = {.seq = bpf_htonl(p->seq), .ack = bpf_htonl(p->ack)};
	struct tcp_fields update = {
		.seq = bpf_htonl(ct_former_seq(c, c->side)),
		.ack = bpf_htonl(ct_former_seq(c, !c->side)),
	};
	long err = bpf_skb_load_bytes(skb, p->l4 + 12, &own.flags, sizeof(own.flags));

	if (err)
		return err;
	update.flags = (own.flags & bpf_htons(TCP_LENGTH)) | bpf_htons(TCP_ACK);
	if (p->tcp_fin || p->tcp_rst) {
		update.seq = bpf_htonl(ct_next_seq(c, c->side));
		update.flags |= p->tcp_rst ? bpf_htons(TCP_RST) : bpf_htons(TCP_FIN);
	}
	err = tcp_rewrite_fields(skb, p, &own, &update);
	if (!err) {
		skb->tc_index = TAG_CT_UPDATE;
		bpf_clone_redirect(skb, skb->ifindex, BPF_F_INGRESS);
		skb->tc_index = TAG_NONE;
	}
	return err ?: tcp_rewrite_fields(skb, p, &update, &own);
}

/* Tracks FINs and their ACKs. Deletes the entry when both FINs are acknowledged. */
static __always_inline void offload_track_close(const struct packet *p, const struct connection *c)
{
	struct offload *offload = c->offload;

	if (p->tcp_fin) {
		if (c->side)
			offload->fin_seq[1] = packet_seq_end(p);
		else
			offload->fin_seq[0] = packet_seq_end(p);
		offload->state |= OFFLOAD_FIN << c->side;
	}
	if (offload->state & OFFLOAD_FIN << !c->side &&
	    p->ack == (c->side ? offload->fin_seq[0] : offload->fin_seq[1]))
		offload->state |= OFFLOAD_FIN_ACK << !c->side;
	if ((offload->state & OFFLOAD_CLOSED) == OFFLOAD_CLOSED)
		bpf_map_delete_elem(&offload_tcp, &c->key);
}

/* Reports whether p may bypass the stack. */
static __always_inline bool offload_allows(const struct packet *p, const struct connection *c)
{
	const struct offload *offload = c->offload;

	if (!offload || offload->owners != c->owners ||
	    offload_is_void(p, c, offload->uplink, offload->ct_seen) ||
	    (offload->state & OFFLOAD_DELIVERED_BOTH) != OFFLOAD_DELIVERED_BOTH ||
	    is_ct_update(p, c))
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
	return skb->ifindex != c->offload->uplink || p->end_expected ||
	       p->seq == ct_next_seq(c, c->side);
}

/*
 * Updates the entry of p, which bypasses the stack, and conntrack if it is due. Returns 0 or
 * an error.
 */
static __noinline long offload_track_bypass(struct __sk_buff *skb, const struct packet *p,
					    const struct connection *c)
{
	struct offload *offload = c->offload;
	bool end = p->tcp_fin || p->tcp_rst;
	__u32 now;

	if (!offload || p->protocol != IPPROTO_TCP)
		return 0;
	now = now_ticks();
	if (end ? offload_end_counts(skb, p, c)
		: now - offload->ct_seen > CT_TCP_INTERVAL && p->len <= CT_UPDATE_MAX_LEN) {
		offload->ct_seen = now;
		if (ct_update_send(skb, p, c))
			return -EINVAL;
	}
	if (p->tcp_fin || offload->state & OFFLOAD_FIN_ANY)
		offload_track_close(p, c);
	/* A remote's RST may be forged, and ignored by the container. */
	if (p->tcp_rst && skb->ifindex != offload->uplink)
		offload->state &= ~OFFLOAD_DELIVERED_BOTH;
	return 0;
}

/* Removes the entry of the former connection when a SYN and its reply start a new one. */
static __always_inline void offload_track_open(const struct packet *p, const struct connection *c)
{
	if (p->tcp_syn)
		c->offload->state |= OFFLOAD_SYN << c->side;
	else if (c->offload->state & OFFLOAD_SYN << !c->side)
		bpf_map_delete_elem(&offload_tcp, &c->key);
}

static __always_inline bool offload_matches(const struct connection *c)
{
	return c->offload && c->offload->owners == c->owners && c->offload->uplink == c->uplink;
}

/* Reports whether the stack has delivered a packet of p's side before. */
static __always_inline bool offload_has_side(const struct connection *c)
{
	return offload_matches(c) && c->offload->state & OFFLOAD_DELIVERED << c->side;
}

/*
 * Records the numbers of p, which the stack has delivered: conntrack has seen them, of both
 * sides. A remote's packet may be forged, and conntrack lets numbers before its window pass
 * (Linux 6.1), so only those of a container's packet are recorded.
 */
static __always_inline void offload_record_numbers(struct offload *offload, const struct packet *p,
						   __u32 side)
{
	if (side) {
		offload->ct_ack[1] = p->ack;
		offload->ct_ack[0] = packet_seq_end(p);
	} else {
		offload->ct_ack[0] = p->ack;
		offload->ct_ack[1] = packet_seq_end(p);
	}
}

/* Records that the stack has delivered p. Keeps the entry's data of the other side. */
static __noinline void offload_store(const struct packet *p, const struct connection *c,
				     bool by_container)
{
	struct offload offload = {.owners = c->owners, .uplink = c->uplink};

	if (offload_matches(c))
		offload = *c->offload;
	if (by_container) {
		offload.ct_seq[0] = c->side ? p->ack : p->seq;
		offload.ct_seq[1] = c->side ? p->seq : p->ack;
		offload_record_numbers(&offload, p, c->side);
	}
	offload.state |= OFFLOAD_DELIVERED << c->side;
	offload.ct_seen = now_ticks();
	if (p->protocol == IPPROTO_TCP)
		bpf_map_update_elem(&offload_tcp, &c->key, &offload, BPF_ANY);
	else
		bpf_map_update_elem(&offload_udp, &c->key, &offload, BPF_ANY);
}

/* Records p, a later packet of its side that the stack has delivered. */
static __always_inline void offload_touch(const struct packet *p, const struct connection *c,
					  bool by_container)
{
	__u32 now = now_ticks();

	if (c->offload->ct_seen != now)
		c->offload->ct_seen = now;
	if (by_container)
		offload_record_numbers(c->offload, p, c->side);
	if (p->tcp_fin || c->offload->state & OFFLOAD_FIN_ANY)
		offload_track_close(p, c);
}
