/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Notes about the packets of a tuple, for the hooks of other CPUs, which cannot see
 * the forwarding cache of this one:
 *
 *  - TCP from a container to a remote: the number that it has acknowledged last;
 *  - TCP from a remote: the number behind its last packet;
 *  - UDP: the stack has delivered a packet.
 *
 * A note is one word, so it is read and written whole. Tuples share places, and
 * overwrite each other's notes.
 */
#pragma once

#include "maps.h"
#include "tag.h"
#include "time.h"

#define NOTE_UNTAKEN	(1ULL << 32) /* the lowest bit of each id */
#define CT_UDP_INTERVAL TICKS(5)     /* conntrack forgets UDP after 30 s at the earliest */

/* NULL only for the verifier. */
static __always_inline volatile __u64 *tuple_note_lookup(__u32 id)
{
	__u32 place = (id >> 1) % TUPLE_NOTES;

	return bpf_map_lookup_elem(&tuple_notes, &place);
}

static __always_inline void tuple_note_write(__u32 id, __u32 value)
{
	volatile __u64 *word = tuple_note_lookup(id);
	__u64 note = (__u64)id << 32 | value;

	if (word && *word != note)
		*word = note;
}

/* As tuple_note_write. Returns false, and writes nothing, if the former note was taken. */
static __always_inline bool tuple_note_renew(__u32 id, __u32 value)
{
	volatile __u64 *word = tuple_note_lookup(id);

	if (!word || !(*word & NOTE_UNTAKEN))
		return false;
	tuple_note_write(id, value);
	return true;
}

/* The noted number, or another one if there is none. */
static __always_inline __u32 tuple_note_read(__u32 id, __u32 other)
{
	volatile __u64 *word = tuple_note_lookup(id);
	__u64 note;

	if (!word)
		return other;
	note = *word | NOTE_UNTAKEN;
	return note >> 32 == id ? note : other;
}

/* The same, but the note is not renewed until it is written again. */
static __always_inline __u32 tuple_note_take(__u32 id, __u32 other)
{
	volatile __u64 *word = tuple_note_lookup(id);
	__u64 note;

	if (!word)
		return other;
	note = *word;
	if ((note | NOTE_UNTAKEN) >> 32 != id)
		return other;
	*word = note & ~NOTE_UNTAKEN;
	return note;
}

/* p opens a connection, of which nothing is noted. */
static __always_inline void tuple_note_clear(const struct packet *p)
{
	__u32 id = tuple_id(packet_tuple(p));
	volatile __u64 *word = tuple_note_lookup(id);

	if (word && *word >> 32 == id)
		*word = 0;
}

/*
 * The stack has delivered p, if that is UDP. hop tells of the next hop; 0: a container. The
 * note has it beside 16 bits of the time.
 */
static __always_inline void tuple_note_delivery(const struct packet *p, __u16 hop)
{
	if (p->protocol == IPPROTO_UDP)
		tuple_note_write(tuple_id(packet_tuple(p)), now_ticks() << 16 | hop);
}

/* The stack has delivered a UDP packet of the other side's not long ago, to *hop. */
static __always_inline bool tuple_reply_is_delivered(const struct packet *p, __u16 *hop)
{
	__u32 id = id_of(hash_tuple(&p->dst, p->dport, &p->src, p->sport, p->protocol, p->ipv6));
	volatile __u64 *word = tuple_note_lookup(id);
	__u64 note = word ? *word : 0;

	*hop = note;
	return note >> 32 == id && (__u16)(now_ticks() - ((__u32)note >> 16)) <= CT_UDP_INTERVAL;
}
