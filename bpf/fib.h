/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Questions to the host's routing tables. The tables are the truth; no copy of them is kept. */
#pragma once

#include "maps.h"
#include "parse.h"

#define AF_INET	 2
#define AF_INET6 10

/* Newer than the uapi headers that this is compiled with. */
#define F_FIB_SKIP_NEIGH (1U << 2) /* BPF_FIB_LOOKUP_SKIP_NEIGH, 6.3 */
#define F_FIB_SRC	 (1U << 4) /* BPF_FIB_LOOKUP_SRC, 6.7 */

struct next_hop {
	__u32 ifindex;
	struct bpf_redir_neigh neigh;
};

static __always_inline void fib_key(struct bpf_fib_lookup *fib, const struct packet *p,
				    const struct addr *dst, __u32 ifindex)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->l4_protocol = p->protocol;
	fib->sport = bpf_htons(p->sport);
	fib->dport = bpf_htons(p->dport);
	fib->ifindex = ifindex;
	if (p->ipv6) {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_src, &p->src, sizeof(p->src));
		__builtin_memcpy(fib->ipv6_dst, dst, sizeof(*dst));
	} else {
		fib->family = AF_INET;
		fib->ipv4_src = addr_ipv4(&p->src);
		fib->ipv4_dst = addr_ipv4(dst);
	}
}

/* What the host would do with a packet to dst that came in where skb did. */
static __noinline long fib_lookup(struct __sk_buff *skb, const struct packet *p,
				  const struct addr *dst)
{
	struct bpf_fib_lookup fib;

	fib_key(&fib, p, dst, skb->ifindex);
	return bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
}

static __always_inline bool fib_forwards(long result)
{
	return result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH ||
	       result == BPF_FIB_LKUP_RET_FRAG_NEEDED || result == BPF_FIB_LKUP_RET_UNSUPP_LWT;
}

/*
 * The destination is an address of this host. The kernel answers alike for "to
 * me" and for "no route", so its neighbours decide: where a route leads to one
 * of the two addresses that differ in one of the last bits, the destination has
 * no route of its own but the local one. Wrong only for an address that is the
 * host's alone (a /32) on a host that routes to nowhere near it and has no
 * default route; that is then taken for foreign, and left to the stack.
 *
 * Of the packet at hand. Global as masq_try is.
 */
__noinline int fib_is_local(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct addr near;

	if (!p)
		return false;
	if (fib_lookup(skb, p, &p->dst) != BPF_FIB_LKUP_RET_NOT_FWDED)
		return false;
	for (int bit = 0; bit < 8; bit++) {
		near = p->dst;
		near.bytes[15] ^= 1 << bit;
		if (fib_forwards(fib_lookup(skb, p, &near)))
			return true;
	}
	return false;
}

/* Programs of ours are on the device, so that what leaves by it is masqueraded. */
static __always_inline bool is_uplink(__u32 ifindex)
{
	struct uplink *uplink = bpf_map_lookup_elem(&uplinks, &ifindex);

	return uplink && !uplink->container_bridge;
}

/*
 * The device and the next hop by which the host forwards p, of which a segment has
 * length bytes, when it comes in by ifindex.
 */
static __noinline long fib_next_hop(struct __sk_buff *skb, const struct packet *p, __u32 ifindex,
				    __u32 length, struct next_hop *next)
{
	struct bpf_fib_lookup fib;
	long result;

	fib_key(&fib, p, &p->dst, ifindex);
	fib.tot_len = length;
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	next->ifindex = fib.ifindex;
	next->neigh.nh_family = fib.family;
	__builtin_memcpy(next->neigh.ipv6_nh, fib.ipv6_dst, sizeof(next->neigh.ipv6_nh));
	return result;
}

/*
 * The address that the route to the destination gives a packet of this host
 * that leaves by the device of skb. Returns false where there is none.
 */
static __noinline bool fib_source(struct __sk_buff *skb, const struct packet *p,
				  struct addr *source)
{
	__u32 ifindex = skb->ifindex;
	struct bpf_fib_lookup fib;
	struct uplink *uplink;
	long result;

	fib_key(&fib, p, &p->dst, ifindex);
	result = bpf_fib_lookup(skb, &fib, sizeof(fib),
				BPF_FIB_LOOKUP_OUTPUT | F_FIB_SKIP_NEIGH | F_FIB_SRC);
	if (result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_FRAG_NEEDED) {
		if (p->ipv6)
			__builtin_memcpy(source, fib.ipv6_src, sizeof(*source));
		else
			addr_from_ipv4(source, fib.ipv4_src);
		/* The kernel may have none of use: 0.0.0.0, ::1, or a link-local one. */
		if (source->bytes[p->ipv6 ? 0 : 12] && !addr_is_link_scoped(source, p->ipv6))
			return true;
	}

	uplink = bpf_map_lookup_elem(&uplinks, &ifindex);
	if (!uplink)
		return false;
	*source = p->ipv6 ? uplink->addr6 : uplink->addr4;
	return source->bytes[p->ipv6 ? 0 : 12] != 0;
}
