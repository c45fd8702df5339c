/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Lookups in the host's routing tables. No copy of them is kept. */
#pragma once

#include "bytes.h"
#include "endpoint.h"
#include "node.h"

/* Newer than the uapi headers that this is compiled with. */
#define F_FIB_SKIP_NEIGH (1U << 2) /* BPF_FIB_LOOKUP_SKIP_NEIGH, 6.3 */
#define F_FIB_SRC	 (1U << 4) /* BPF_FIB_LOOKUP_SRC, 6.7 */

/* The arguments of fib_args_are_local. */
SCRATCH(fib_scratch, struct bpf_fib_lookup);

static __always_inline void fib_init(struct bpf_fib_lookup *fib, const struct addr *dst, bool ipv6,
				     __u32 ifindex)
{
	__builtin_memset(fib, 0, sizeof(*fib));
	fib->ifindex = ifindex;
	if (ipv6) {
		fib->family = AF_INET6;
		__builtin_memcpy(fib->ipv6_dst, dst, sizeof(*dst));
	} else {
		fib->family = AF_INET;
		fib->ipv4_dst = addr_ipv4(dst);
	}
}

/* Sets fib for a packet with the tuple, as if it were addressed to dst. */
static __always_inline void fib_init_tuple(struct bpf_fib_lookup *fib, const struct fwd_key *tuple,
					   const struct addr *dst, __u32 ifindex)
{
	fib_init(fib, dst, tuple->ipv6, ifindex);
	fib->l4_protocol = tuple->protocol;
	fib->sport = bpf_htons(tuple->sport);
	fib->dport = bpf_htons(tuple->dport);
	if (tuple->ipv6)
		__builtin_memcpy(fib->ipv6_src, &tuple->src, sizeof(tuple->src));
	else
		fib->ipv4_src = addr_ipv4(&tuple->src);
}

/* Looks up the route for p, received on skb's device, as if it were addressed to dst. */
static __noinline long fib_lookup(struct __sk_buff *skb, const struct packet *p,
				  const struct addr *dst)
{
	struct bpf_fib_lookup fib;

	fib_init_tuple(&fib, packet_tuple(p), dst, skb->ifindex);
	return bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
}

static __always_inline bool fib_forwards(long result)
{
	return result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH ||
	       result == BPF_FIB_LKUP_RET_FRAG_NEEDED || result == BPF_FIB_LKUP_RET_UNSUPP_LWT;
}

/* Reports whether there is a route to another host, or one that refuses packets. */
static __always_inline bool fib_has_route(long result)
{
	return fib_forwards(result) || result == BPF_FIB_LKUP_RET_UNREACHABLE;
}

/*
 * Reports whether the destination in fib_scratch is an address of this host.
 *
 * bpf_fib_lookup returns the same for a local address and for a missing route.
 * So the eight addresses that differ from the destination in one of the last bits are
 * looked up. If one has a route, the destination has none only because it is local.
 *
 * On a host without routes to any of them, and without a default route, a local /32 is
 * not recognized. Its packets are left to the stack.
 */
__noinline int fib_args_are_local(struct __sk_buff *skb)
{
	struct bpf_fib_lookup *args = fib_scratch_get(), fib;

	if (!args)
		return false;
	fib = *args;
	if (bpf_fib_lookup(skb, &fib, sizeof(fib), 0) != BPF_FIB_LKUP_RET_NOT_FWDED)
		return false;
	for (int bit = 0; bit < 8; bit++) {
		fib = *args;
		if (fib.family == AF_INET6)
			((__u8 *)fib.ipv6_dst)[15] ^= 1 << bit;
		else
			((__u8 *)&fib.ipv4_dst)[3] ^= 1 << bit;
		if (fib_has_route(bpf_fib_lookup(skb, &fib, sizeof(fib), 0)))
			return true;
	}
	return false;
}

static __always_inline bool fib_is_local(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup *args = fib_scratch_get();

	if (!args)
		return false;
	fib_init_tuple(args, packet_tuple(p), &p->dst, skb->ifindex);
	return fib_args_are_local(skb);
}

/*
 * Reports whether the host would forward or refuse p, so it is not for the host itself. If not, p
 * need not be local: there may be no route.
 */
static __always_inline bool fib_leads_away(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup *args = fib_scratch_get();

	if (!args || addr_is_link_scoped(&p->dst, p->ipv6))
		return false;
	fib_init_tuple(args, packet_tuple(p), &p->dst, skb->ifindex);
	return fib_has_route(bpf_fib_lookup(skb, args, sizeof(*args), 0));
}

enum exit {		  /* where a container's packet leaves */
	EXIT_OTHER = 0,	  /* by a device without our programs */
	EXIT_GUARDED = 1, /* by one with them, or refused */
	EXIT_HOST = 2,	  /* perhaps to the host itself */
};

/* Reports where p leaves, which skb's device has received from a container. */
static __noinline enum exit fib_exit(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup *args = fib_scratch_get();
	long result;

	if (!args)
		return EXIT_OTHER;
	/* Unlike those of IPv6, link-local addresses of IPv4 are routed. */
	if (p->ipv6 ? addr_is_link_scoped(&p->dst, true) : p->dst.bytes[12] >= 224)
		return EXIT_HOST;
	fib_init_tuple(args, packet_tuple(p), &p->dst, skb->ifindex);
	result = bpf_fib_lookup(skb, args, sizeof(*args), 0);
	if (result == BPF_FIB_LKUP_RET_UNSUPP_LWT)
		return node_lookup(&p->dst) ? EXIT_GUARDED : EXIT_OTHER;
	if (fib_forwards(result))
		return is_uplink(args->ifindex) || device_lookup(args->ifindex) ||
				       node_is_tunnel(args->ifindex)
			       ? EXIT_GUARDED
			       : EXIT_OTHER;
	/* The rest, such as FWD_DISABLED where the device does not forward, says nothing about the host's own addresses. */
	return result == BPF_FIB_LKUP_RET_BLACKHOLE || result == BPF_FIB_LKUP_RET_UNREACHABLE ||
			       result == BPF_FIB_LKUP_RET_PROHIBIT
		       ? EXIT_GUARDED
		       : EXIT_HOST;
}

/* Reports whether the host would send p, received by an uplink, out by one. */
static __noinline bool fib_leads_out(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup *args = fib_scratch_get();
	long result;

	if (!args)
		return false;
	fib_init_tuple(args, packet_tuple(p), &p->dst, skb->ifindex);
	result = bpf_fib_lookup(skb, args, sizeof(*args), 0);
	return result == BPF_FIB_LKUP_RET_UNSUPP_LWT ||
	       (fib_forwards(result) && is_uplink(args->ifindex));
}

static __always_inline bool fib_is_local_addr(struct __sk_buff *skb, const struct addr *addr,
					      bool ipv6)
{
	struct bpf_fib_lookup *args = fib_scratch_get();

	if (!args)
		return false;
	fib_init(args, addr, ipv6, skb->ifindex);
	return fib_args_are_local(skb);
}

/*
 * Sets next to the next hop of p, in segments of len bytes, as if it had arrived on ifindex. For
 * a route with a tunnel, the helper checks the MTU, but returns neither device nor node.
 */
static __noinline long fib_next_hop(struct __sk_buff *skb, const struct packet *p, __u32 ifindex,
				    __u32 len, struct next_hop *next)
{
	struct bpf_fib_lookup fib;
	long result;

	fib_init_tuple(&fib, packet_tuple(p), &p->dst, ifindex);
	fib.tot_len = len;
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (result == BPF_FIB_LKUP_RET_UNSUPP_LWT)
		return node_next_hop(p, len, next);
	next->tunnel = false;
	next->max_len = fib.tot_len > len ? fib.tot_len : len; /* the MTU, since Linux 5.12 */
	next->ifindex = fib.ifindex;
	next->neigh.nh_family = fib.family;
	__builtin_memcpy(next->neigh.ipv6_nh, fib.ipv6_dst, sizeof(next->neigh.ipv6_nh));
	return result;
}

/*
 * Reports whether bpf_fib_lookup forwards p, from the device that received it, to the uplink and
 * next hop that the stack has chosen.
 */
static __noinline bool fib_routes_to(struct __sk_buff *skb, const struct packet *p, __u32 uplink)
{
	struct bpf_fib_lookup fib;
	__u8 chosen[ETH_ALEN];
	long result;

	fib_init_tuple(&fib, packet_tuple(p), &p->dst, skb->ingress_ifindex);
	fib.tot_len = packet_segment_len(skb, p);
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (result == BPF_FIB_LKUP_RET_UNSUPP_LWT)
		return node_reaches(&p->dst, uplink);
	if (result || fib.ifindex != uplink || bpf_skb_load_bytes(skb, 0, chosen, sizeof(chosen)))
		return false;
	return mac_equal(chosen, fib.dmac);
}

/* Returns a 16-bit hash of a frame's MAC addresses: of the device and the next hop. */
static __always_inline __u16 fib_hop_of(const __u8 *dst, const __u8 *src)
{
	const __u16 *to = (const __u16 *)dst, *from = (const __u16 *)src;

	return to[0] ^ to[1] ^ to[2] ^ from[0] ^ from[1] ^ from[2];
}

/*
 * Returns the hash of the frame that the stack sends. By the tunnel it is 0: both addresses
 * are equal.
 */
static __always_inline __u16 fib_hop_of_frame(struct __sk_buff *skb)
{
	struct ethhdr *eth = linear_at(skb, 0, sizeof(*eth));

	return eth ? fib_hop_of(eth->h_dest, eth->h_source) : 0;
}

/*
 * Reports whether the host would forward a reply to packets with the tuple, from skb's device, to the
 * uplink and to the next hop with the hash.
 */
static __noinline bool fib_routes_reply_to(struct __sk_buff *skb, const struct fwd_key *tuple,
					   __u32 uplink, __u16 hop)
{
	struct bpf_fib_lookup fib;
	long result;
	struct fwd_key reply = {
		.src = tuple->dst,
		.dst = tuple->src,
		.sport = tuple->dport,
		.dport = tuple->sport,
		.protocol = tuple->protocol,
		.ipv6 = tuple->ipv6,
	};

	fib_init_tuple(&fib, &reply, &tuple->src, skb->ifindex);
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (result == BPF_FIB_LKUP_RET_UNSUPP_LWT)
		return !hop && node_reaches(&tuple->src, uplink);
	return !result && fib.ifindex == uplink && fib_hop_of(fib.dmac, fib.smac) == hop;
}

/*
 * Reports whether the host would send packets to p's sender by the device that p arrived on:
 * the strict reverse path of RFC 3704, which the stack checks with rp_filter=1. Packets from the
 * tunnel are from the right node (node_admits).
 */
static __noinline bool fib_reverse_path(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_fib_lookup fib;
	long result;

	if (node_is_tunnel(skb->ifindex))
		return node_reaches(&p->src, skb->ifindex);
	fib_init(&fib, &p->src, p->ipv6, skb->ifindex);
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	/* The helper does not return the device of a route with a tunnel. */
	return result != BPF_FIB_LKUP_RET_UNSUPP_LWT && fib_forwards(result) &&
	       fib.ifindex == skb->ifindex;
}

/* Returns the device on which addr is a neighbor of the host, or 0. */
static __noinline __u32 fib_neighbor(struct __sk_buff *skb, const struct addr *addr, bool ipv6)
{
	struct bpf_fib_lookup fib;
	long result;
	bool on_link;

	fib_init(&fib, addr, ipv6, skb->ifindex);
	result = bpf_fib_lookup(skb, &fib, sizeof(fib), 0);
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return 0;
	/* For a route with a gateway, the result has the gateway instead of the address. */
	on_link = ipv6 ? addr_equal((const struct addr *)fib.ipv6_dst, addr)
		       : fib.ipv4_dst == addr_ipv4(addr);
	return on_link ? fib.ifindex : 0;
}

/*
 * Sets source to the address that the host would choose for the tuple's destination on the
 * uplink: the route's, or on older kernels the uplink's. Returns false if there is none.
 */
static __noinline bool fib_source(struct __sk_buff *skb, const struct fwd_key *tuple, __u32 ifindex,
				  struct addr *source)
{
	bool ipv6 = tuple->ipv6;
	struct bpf_fib_lookup fib;
	struct uplink *uplink;
	long result;

	fib_init_tuple(&fib, tuple, &tuple->dst, ifindex);
	result = bpf_fib_lookup(skb, &fib, sizeof(fib),
				BPF_FIB_LOOKUP_OUTPUT | F_FIB_SKIP_NEIGH | F_FIB_SRC);
	/* In IPv6, this lookup only prefers the device, and ignores rules by source. */
	if (ipv6 && fib.ifindex != ifindex) {
		fib_init_tuple(&fib, tuple, &tuple->dst, skb->ingress_ifindex);
		result = bpf_fib_lookup(skb, &fib, sizeof(fib), F_FIB_SKIP_NEIGH | F_FIB_SRC);
	}
	if ((result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_FRAG_NEEDED) &&
	    fib.ifindex == ifindex) {
		if (ipv6)
			__builtin_memcpy(source, fib.ipv6_src, sizeof(*source));
		else
			addr_from_ipv4(source, fib.ipv4_src);
		/* The kernel may offer only 0.0.0.0, ::1 or a link-local address. */
		if (source->bytes[ipv6 ? 0 : 12] && !addr_is_link_scoped(source, ipv6))
			return true;
	}

	uplink = uplink_lookup(ifindex);
	if (!uplink)
		return false;
	*source = ipv6 ? uplink->addr6 : uplink->addr4;
	return source->bytes[ipv6 ? 0 : 12] != 0;
}
