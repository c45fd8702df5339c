/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Tags in skb->tc_index, which pass information from one hook to the next. */
#pragma once

#include "hash.h"
#include "packet.h"

enum tag {
	TAG_NONE = 0,
	TAG_BYPASS_ONCE = 0xe9, /* TAG_BYPASS, but the connection's next packet may not bypass */
	/* A RST in the name of a container (policy_reset.h). A container can set it, so the flow must agree. */
	TAG_RESET = 0xea,
	TAG_BYPASS = 0xeb, /* bypasses the stack; to_uplink still has to translate it */
	/* to_uplink passes it: fwd_cache has translated it, or it is a hairpin packet, or one to another node. */
	TAG_TRANSLATED = 0xed,
	/* A copy for the stack alone. A container can set it, but only slows itself down. */
	TAG_CT_UPDATE = 0xec,
	TAG_REENTRY = 0xee,  /* translated, and received again; reentry_of is in cb */
	TAG_ADMITTED = 0xef, /* from another node, and received again, without the tunnel's data */
	/*
	 * For the stack: a flag, and a hash of the packet's tuple, which shows whether it
	 * changes.
	 */
	TAG_TUPLE = 0x8000,
	TAG_PENDING = 0x4000, /* the last hook creates the flow: of struct routed */
	/* The last hook records the delivery, for the offload; with TAG_BYPASS: the connection is offloaded. */
	TAG_OBSERVE = 0x2000,
	/* Also with other tags: the rules of the container that sends it admit it; from an uplink: the receiver's. */
	TAG_JUDGED = 0x1000,
};

/* Reports whether from_container has sent the packet with the tag past the stack. */
static __always_inline bool tag_bypasses(__u32 tag)
{
	_Static_assert(TAG_BYPASS == (TAG_BYPASS_ONCE | 2),
		       "one comparison, which is less to verify");
	return (tag | TAG_OBSERVE | 2) == (TAG_BYPASS | TAG_OBSERVE);
}

/* Returns our tag and removes it. Other values of tc_index stay. */
static __always_inline __u32 tag_take(struct __sk_buff *skb)
{
	__u32 tag = skb->tc_index & ~TAG_JUDGED;

	if (!tag_bypasses(tag) && tag != TAG_TRANSLATED && tag != TAG_CT_UPDATE &&
	    tag != TAG_REENTRY && tag != TAG_ADMITTED && tag != TAG_RESET && !(tag & TAG_TUPLE))
		return TAG_NONE;
	skb->tc_index = TAG_NONE;
	return tag;
}

/* Reports whether skb has a tag of ours with TAG_JUDGED. Before tag_take. */
static __always_inline bool tag_is_judged(struct __sk_buff *skb)
{
	__u32 tag = skb->tc_index;

	return tag & TAG_JUDGED && (tag & TAG_TUPLE || tag_bypasses(tag & ~TAG_JUDGED) ||
				    tag == (TAG_TRANSLATED | TAG_JUDGED));
}

/* Returns what the tag has to say about rules. */
static __always_inline __u32 tag_judged(const struct packet *p)
{
	return p->decided.admitted ? TAG_JUDGED : 0;
}

/*
 * Returns the id of packets from src:sport to dst:dport: an unpredictable hash, and the lowest bit,
 * so that it is never 0.
 */
static __always_inline __u32 id_of(const struct addr *src, __u16 sport, const struct addr *dst,
				   __u16 dport, __u8 protocol, bool ipv6)
{
	const __u32 *a = (const __u32 *)src, *b = (const __u32 *)dst;
	__u32 hash = (__u32)config.secret[0] ^ protocol;

	hash = hash_mix(hash, (__u32)sport << 16 | dport);
	hash = hash_mix(hash, a[3]);
	hash = hash_mix(hash, b[3]);
	if (ipv6)
		for (int i = 0; i < 3; i++)
			hash = hash_mix(hash_mix(hash, a[i]), b[i]);
	return hash | 1;
}

static __always_inline __u32 tuple_id(const struct fwd_key *tuple)
{
	return id_of(&tuple->src, tuple->sport, &tuple->dst, tuple->dport, tuple->protocol,
		     tuple->ipv6);
}

/*
 * Returns what shows that a packet from src to dst was translated by a program, with its tag: a container of another engine, behind a
 * bridge, can set any tag, but does not know this hash. judged: as TAG_JUDGED.
 */
static __always_inline __u32 reentry_of(const struct packet *p, const struct addr *dst, bool judged)
{
	__u32 id = id_of(&p->src, 0, dst, 0, p->protocol, p->ipv6);

	return judged ? id : id ^ 1;
}

/* Sets p's id, whenever its tuple has changed. */
static __always_inline void packet_set_id(struct packet *p)
{
	p->id = tuple_id(packet_tuple(p));
}

/* The tag for packets whose tuple has the id. */
static __always_inline __u32 tag_of(__u32 id)
{
	return TAG_TUPLE | (id >> 1 & (TAG_JUDGED - 1));
}

/*
 * Reports whether an ingress hook has set the tag, for a packet whose tuple has the id: if it is p's, the stack has not changed p.
 * The tag of one changed packet in 4,096 matches by chance.
 */
static __always_inline bool tag_is_of(__u32 tag, __u32 id)
{
	return (tag & ~(__u32)(TAG_PENDING | TAG_OBSERVE)) == tag_of(id);
}
