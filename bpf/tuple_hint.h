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
 * overwrite each other's hints. A place has an epoch, too, whose end voids the decisions of all CPUs about its
 * tuples: a SYN ends it, because of those about the tuple's former connection, and so does the begin of an offload,
 * because of those that take the connection for new.
 */
#pragma once

#include "maps.h"
#include "tag.h"

/* The word: above these, the part of the id that the place does not tell; below, the hint. */
#define HINT_VALID	(1ULL << 46)
#define HINT_UNTAKEN	(1ULL << 45)
#define HINT_EPOCH	(1ULL << 32)
#define HINT_EPOCHS	(HINT_EPOCH * 0xff)
#define CT_UDP_INTERVAL TICKS(5) /* conntrack forgets UDP after 30 s at the earliest */

_Static_assert(TUPLE_HINTS == 1 << 14, "an id has 17 other bits");

/* NULL only for the verifier. */
static __always_inline volatile __u64 *tuple_hint_lookup(__u32 id)
{
	__u32 place = (id >> 1) % TUPLE_HINTS;

	return bpf_map_lookup_elem(&tuple_notes, &place);
}

/* Reports whether the word has a hint of the tuple with the id. */
static __always_inline bool tuple_hint_is_of(__u64 word, __u32 id)
{
	return word >> 46 == (id >> 15 << 1 | 1);
}

/* Returns the word at the place of the tuple with the id: perhaps another tuple's. */
static __always_inline __u64 tuple_hint_load(__u32 id)
{
	volatile __u64 *word = tuple_hint_lookup(id);

	return word ? *word : 0;
}

/* Returns the epoch in a word. */
static __always_inline __u8 tuple_hint_epoch(__u64 word)
{
	return word >> 32;
}

/* Writes the hint, and adds the number of epochs. */
static __always_inline void tuple_hint_set(__u32 id, __u32 value, __u64 epochs)
{
	volatile __u64 *word = tuple_hint_lookup(id);
	__u64 old, hint;

	if (!word)
		return;
	old = *word;
	hint = (__u64)(id >> 15) << 47 | HINT_VALID | HINT_UNTAKEN |
	       ((old + epochs * HINT_EPOCH) & HINT_EPOCHS) | value;
	if (old != hint)
		*word = hint;
}

static __always_inline void tuple_hint_write(__u32 id, __u32 value)
{
	tuple_hint_set(id, value, 0);
}

/* The same, and begins an epoch. */
static __always_inline void tuple_hint_begin(__u32 id, __u32 value)
{
	tuple_hint_set(id, value, 1);
}

/* Returns the hint, taken or not, or 0 if there is none. */
static __always_inline __u64 tuple_hint_get(__u32 id)
{
	__u64 hint = tuple_hint_load(id);

	return tuple_hint_is_of(hint, id) ? hint : 0;
}

/* Returns the number in the hint, or other if there is none. */
static __always_inline __u32 tuple_hint_read(__u32 id, __u32 other)
{
	__u64 hint = tuple_hint_get(id);

	return hint ? hint : other;
}

/*
 * Returns the number in the hint, or other if there is none. Marks the hint as taken: until the
 * next write, cached decisions do not apply (fwd_renew_hint).
 */
static __always_inline __u32 tuple_hint_take(__u32 id, __u32 other)
{
	volatile __u64 *word = tuple_hint_lookup(id);
	__u64 hint;

	if (!word)
		return other;
	hint = *word;
	if (!tuple_hint_is_of(hint, id))
		return other;
	*word = hint & ~HINT_UNTAKEN;
	return hint;
}

/* Begins an epoch with p, which opens a connection, and removes the hint of the tuple. */
static __always_inline void tuple_hint_reopen(const struct packet *p)
{
	volatile __u64 *word = tuple_hint_lookup(p->id);
	__u64 old, epoch;

	if (!word)
		return;
	old = *word;
	epoch = (old + HINT_EPOCH) & HINT_EPOCHS;
	*word = tuple_hint_is_of(old, p->id) ? epoch : (old & ~HINT_EPOCHS) | epoch;
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
