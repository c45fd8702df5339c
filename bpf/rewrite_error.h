/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Writes a translated address and port into an ICMP error, and into the packet that it quotes. */
#pragma once

#include "checksum.h"
#include "parse_icmp.h"

/* Changes bytes of the quoted packet, which the error's checksum covers. */
static __always_inline long icmp_patch(struct __sk_buff *skb, const struct packet *p, __u32 offset,
				       __u32 from, __u32 to, __u32 size)
{
	long err = bpf_l4_csum_replace(skb, p->l4 + offsetof(struct echohdr, checksum), from, to,
				       size);

	return err ?: bpf_skb_store_bytes(skb, offset, &to, size, 0);
}

/* Updates the checksum of the quoted TCP, UDP or echo message, unless it is cut off. */
static __always_inline long icmp_patch_inner_checksum(struct __sk_buff *skb, const struct packet *p,
						      __s64 diff)
{
	__u32 offset = p->inner_l4;
	__u16 from, to;
	__u64 sum;

	if (p->protocol == IPPROTO_TCP)
		offset += offsetof(struct tcphdr, check);
	else if (p->protocol == IPPROTO_UDP)
		offset += offsetof(struct udphdr, check);
	else
		offset += offsetof(struct echohdr, checksum);
	if (bpf_skb_load_bytes(skb, offset, &from, sizeof(from)))
		return 0;
	if (!from && p->protocol == IPPROTO_UDP)
		return 0;
	sum = (__u16)~from + (__u64)diff;
	to = csum_fold((sum & 0xffffffff) + (sum >> 32));
	if (!to && p->protocol == IPPROTO_UDP)
		to = 0xffff;
	return icmp_patch(skb, p, offset, from, to, sizeof(to));
}

/* One side of a packet, in the 32-bit words that bpf_csum_diff takes. */
struct side_words {
	struct addr addr;
	__be16 port;
	__u16 zero;
};

/* The outer source is the other side's only if that side, not a router, has sent the error. */
static __always_inline bool icmp_outer_changes(const struct packet *p, enum side side)
{
	return side == SIDE_DST || addr_equal(&p->outer_src, &p->src);
}

static __always_inline long rewrite_error_ipv4(struct __sk_buff *skb, const struct packet *p,
					       enum side side, __be32 from, __be32 to)
{
	/* The quoted packet went the other way, so this side's address is its other one. */
	__u32 outer =
		side == SIDE_SRC ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr);
	__u32 inner =
		side == SIDE_SRC ? offsetof(struct iphdr, daddr) : offsetof(struct iphdr, saddr);
	long err = 0;

	if (icmp_outer_changes(p, side)) {
		err = bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check), from, to,
					  sizeof(to));
		err = err ?: bpf_skb_store_bytes(skb, p->l3 + outer, &to, sizeof(to), 0);
	}
	/* Address and header checksum cancel out in the ICMP checksum that covers both. */
	err = err
		      ?: bpf_l3_csum_replace(skb, p->inner_l3 + offsetof(struct iphdr, check), from,
					     to, sizeof(to));
	return err ?: bpf_skb_store_bytes(skb, p->inner_l3 + inner, &to, sizeof(to), 0);
}

static __always_inline long rewrite_error_ipv6(struct __sk_buff *skb, const struct packet *p,
					       enum side side, const struct addr *from,
					       const struct addr *to)
{
	__u32 outer = side == SIDE_SRC ? offsetof(struct ipv6hdr, saddr)
				       : offsetof(struct ipv6hdr, daddr);
	__u32 inner = side == SIDE_SRC ? offsetof(struct ipv6hdr, daddr)
				       : offsetof(struct ipv6hdr, saddr);
	__u32 checksum = p->l4 + offsetof(struct echohdr, checksum);
	__s64 diff = bpf_csum_diff((__be32 *)from, sizeof(*from), (__be32 *)to, sizeof(*to), 0);
	long err = 0;

	if (icmp_outer_changes(p, side)) {
		err = csum_replace_pseudo_ipv6(skb, checksum, diff, 0);
		err = err ?: bpf_skb_store_bytes(skb, p->l3 + outer, to, sizeof(*to), 0);
	}
	err = err ?: bpf_l4_csum_replace(skb, checksum, 0, diff, 0);
	return err ?: bpf_skb_store_bytes(skb, p->inner_l3 + inner, to, sizeof(*to), 0);
}

/* rewrite for an ICMP error: the quoted packet, and the outer address if it is the same. */
static __noinline long rewrite_icmp_error(struct __sk_buff *skb, const struct packet *p,
					  enum side side, const struct addr *addr, __u16 port)
{
	struct side_words from = {.addr = side == SIDE_SRC ? p->src : p->dst}, to = {.addr = *addr};
	__u32 offset = p->inner_l4 + (side == SIDE_SRC ? 2 : 0);
	__s64 diff;
	long err;

	from.port = bpf_htons(side == SIDE_SRC ? p->sport : p->dport);
	to.port = bpf_htons(port);
	if (packet_is_icmp(p))
		offset = p->inner_l4 + offsetof(struct echohdr, id);
	if (packet_is_icmp(p) && !p->ipv6) /* has no pseudo header */
		diff = bpf_csum_diff((__be32 *)&from.port, 4, (__be32 *)&to.port, 4, 0);
	else
		diff = bpf_csum_diff((__be32 *)&from, sizeof(from), (__be32 *)&to, sizeof(to), 0);
	err = p->ipv6 ? rewrite_error_ipv6(skb, p, side, &from.addr, addr)
		      : rewrite_error_ipv4(skb, p, side, addr_ipv4(&from.addr), addr_ipv4(addr));
	if (!p->has_ports)
		return err;
	if (from.port != to.port)
		err = err ?: icmp_patch(skb, p, offset, from.port, to.port, sizeof(to.port));
	return err ?: icmp_patch_inner_checksum(skb, p, diff);
}
