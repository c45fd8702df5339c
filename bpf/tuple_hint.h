/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Hints about the packets of a tuple, for the hooks of other CPUs, which cannot read
 * the forwarding cache of this one:
 *
 *  - TCP from a container to a remote: the number that it last acknowledged;
 *  - TCP from a remote: the sequence number after its last packet;
 *  - UDP: the stack has delivered a packet, unchanged; with another id: a packet that it has translated.
 *
 * A hint is one word, so it is read and written as a whole. Tuples share places, and
 * overwrite each other's hints. A SYN removes the tuple's hint, without which no CPU applies a decision
 * of the former connection (fwd_renew_hint), unless another tuple has the place.
 */
#pragma once

#include "maps.h"
#include "tag.h"

#define HINT_UNTAKEN	(1ULL << 32) /* the lowest bit of each id */
#define CT_UDP_INTERVAL TICKS(5)     /* conntrack forgets UDP after 30 s at the earliest */

/* NULL only for the verifier. */
static __always_inline volatile __u64 *tuple_hint_lookup(__u32 id)
{
	__u32 place = (id >> 1) % TUPLE_HINTS;

	return bpf_map_lookup_elem(&tuple_notes, &place);
}

static __always_inline void tuple_hint_write(__u32 id, __u32 value)
{
	volatile __u64 *word = tuple_hint_lookup(id);
	__u64 hint = (__u64)id << 32 | value;

	if (word && *word != hint)
		*word = hint;
}

/* The same, but the hint is taken: until the next write, tuple_hint_renew fails. */
static __always_inline void tuple_hint_write_taken(__u32 id, __u32 value)
{
	tuple_hint_write(id & ~1U, value);
}

/* Writes the hint, unless the former one was taken. Reports whether it did. */
static __always_inline bool tuple_hint_renew(__u32 id, __u32 value)
{
	volatile __u64 *word = tuple_hint_lookup(id);

	if (!word || !(*word & HINT_UNTAKEN))
		return false;
	tuple_hint_write(id, value);
	return true;
}

/* Returns the hint, as if it had not been taken, or 0 if there is none. */
static __always_inline __u64 tuple_hint_get(__u32 id)
{
	volatile __u64 *word = tuple_hint_lookup(id);
	__u64 hint = word ? *word | HINT_UNTAKEN : 0;

	return hint >> 32 == id ? hint : 0;
}

/* Returns the number in the hint, or other if there is none. */
static __always_inline __u32 tuple_hint_read(__u32 id, __u32 other)
{
	__u64 hint = tuple_hint_get(id);

	return hint ? hint : other;
}

/*
 * Returns the number in the hint, or other if there is none. Marks the hint as taken: until the
 * next write, tuple_hint_renew fails.
 */
static __always_inline __u32 tuple_hint_take(__u32 id, __u32 other)
{
	volatile __u64 *word = tuple_hint_lookup(id);
	__u64 hint;

	if (!word)
		return other;
	hint = *word;
	if ((hint | HINT_UNTAKEN) >> 32 != id)
		return other;
	*word = hint & ~HINT_UNTAKEN;
	return hint;
}

/* Removes the hint of p, which opens a connection. */
static __always_inline void tuple_hint_clear(const struct packet *p)
{
	volatile __u64 *word = tuple_hint_lookup(p->id);

	if (word && (*word | HINT_UNTAKEN) >> 32 == p->id)
		*word = 0;
}

/* Reports whether there is a hint of the tuple with the id: for TCP, the connection may have bypassed the stack. */
static __always_inline bool tuple_hint_exists(__u32 id)
{
	return tuple_hint_get(id);
}

/* The id of the hint of a delivered packet whose tuple has the id. */
static __always_inline __u32 tuple_delivery_id(__u32 id, bool translated)
{
	return translated ? (id ^ GOLDEN) | 1 : id;
}

/*
 * Records that the stack has delivered p, if it is UDP. hop is a hash of the next hop; 0: a
 * container. The hint has it and 16 bits of the time.
 */
static __always_inline void tuple_hint_delivery(const struct packet *p, __u16 hop, bool translated)
{
	if (p->protocol == IPPROTO_UDP)
		tuple_hint_write(tuple_delivery_id(p->id, translated), now_ticks() << 16 | hop);
}

/*
 * Reports whether the stack has recently delivered a UDP packet with the inverse tuple; sets *hop to its next hop and *tick to
 * the time.
 */
static __always_inline bool tuple_reply_is_delivered(const struct fwd_key *tuple, bool translated,
						     __u16 *hop, __u32 *tick)
{
	__u32 id = tuple_delivery_id(id_of(&tuple->dst, tuple->dport, &tuple->src, tuple->sport,
					   tuple->protocol, tuple->ipv6),
				     translated);
	__u64 hint = tuple_hint_get(id);
	__u16 age = now_ticks() - ((__u32)hint >> 16);

	*hop = hint;
	*tick = now_ticks() - age;
	return hint && age <= CT_UDP_INTERVAL;
}

#define TCP_UNACKED (1U << 18) /* bytes that a receiver leaves unacknowledged */

/*
 * Reports whether the packet in pkt_scratch, a RST or FIN under a remote's address, has the
 * expected sequence number; its new address is the container. ack and seq_end are from the
 * flow: what the container last acknowledged, and the end of the remote's last packet. The
 * hints may have later ones. The container's next packet is decided in full, so that the
 * reply is tracked.
 */
__noinline int tuple_end_expected(__u32 ack, __u32 seq_end)
{
	struct packet *p = pkt_scratch_get();
	__u32 reply, hint;

	if (!p)
		return false;
	reply = id_of(&p->decided.new_addr, p->decided.new_port, &p->src, p->sport, p->protocol,
		      p->ipv6);
	hint = tuple_hint_take(reply, ack);
	if ((__s32)(hint - ack) > 0)
		ack = hint;
	hint = tuple_hint_read(p->id, seq_end);
	/* RFC 5961, 3.2. The remote's last packets may not be acknowledged yet. */
	return p->seq == ack ||
	       ((p->seq == seq_end || p->seq == hint) && p->seq - ack < TCP_UNACKED);
}
