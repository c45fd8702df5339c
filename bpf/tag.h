/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Marks in skb->tc_index, which pass information from one hook to the next. */
#pragma once

#include "hash.h"
#include "packet.h"

enum tag {
	TAG_NONE = 0,
	TAG_BYPASS = 0xeb,     /* bypasses the stack; to_uplink still has to translate it */
	TAG_TRANSLATED = 0xed, /* is translated already, by fwd_cache or as a hairpin packet */
	/* A copy for the stack alone. Containers can set it, but only slow themselves down with it. */
	TAG_CT_UPDATE = 0xec,
	TAG_REENTRY = 0xee, /* translated, and received again */
	/* For the stack: a flag, and a hash of the packet's tuple, which tells whether it changes. */
	TAG_TUPLE = 0x8000,
	TAG_ROUTED = 0x4000, /* from the outside, to a container's own address, and of no flow */
};

/* Returns our tag, and takes it off. Others' values of tc_index stay. */
static __always_inline __u32 tag_take(struct __sk_buff *skb)
{
	__u32 tag = skb->tc_index;

	if (tag != TAG_BYPASS && tag != TAG_TRANSLATED && tag != TAG_CT_UPDATE &&
	    tag != TAG_REENTRY && !(tag & TAG_TUPLE))
		return TAG_NONE;
	skb->tc_index = TAG_NONE;
	return tag;
}

/* The tag for p, addressed to addr:port. */
static __always_inline __u32 tag_tuple(const struct packet *p, const struct addr *addr, __u16 port)
{
	const __u32 *src = (const __u32 *)&p->src, *dst = (const __u32 *)addr;
	__u32 hash = (__u32)config.secret[0] ^ p->protocol;

	hash = hash_mix(hash, (__u32)p->sport << 16 | port);
	hash = hash_mix(hash, src[3]);
	hash = hash_mix(hash, dst[3]);
	if (p->ipv6)
		for (int i = 0; i < 3; i++)
			hash = hash_mix(hash_mix(hash, src[i]), dst[i]);
	return TAG_TUPLE | (hash & (TAG_ROUTED - 1));
}

/* The stack has not changed p since the ingress hook gave it the tag. */
static __always_inline bool tag_matches(__u32 tag, const struct packet *p)
{
	return (tag & ~(__u32)TAG_ROUTED) == tag_tuple(p, &p->dst, p->dport);
}
