/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Writes translated addresses, ports and the TTL into a packet, and updates its checksums. */
#pragma once

#include "l4_start.h"
#include "rewrite_error.h"
#include "scratch.h"

/* The offset of the L4 checksum, and bpf_l4_csum_replace's flags for the protocol. */
static __always_inline __u32 checksum_offset(const struct packet *p, __u64 *flags)
{
	*flags = 0;
	switch (p->protocol) {
	case IPPROTO_TCP:
		return p->l4 + offsetof(struct tcphdr, check);
	case IPPROTO_UDP:
		*flags = BPF_F_MARK_MANGLED_0; /* 0 means none (RFC 768): stays 0 */
		return p->l4 + offsetof(struct udphdr, check);
	default:
		return p->l4 + offsetof(struct echohdr, checksum);
	}
}

/* The offset of the port of a side; an echo message has one identifier for both. */
static __always_inline __u32 port_offset(const struct packet *p, enum side side)
{
	if (is_tcp_or_udp(p->protocol))
		return p->l4 + (side == SIDE_SRC ? 0 : 2);
	return p->l4 + offsetof(struct echohdr, id);
}

static __always_inline long rewrite_ipv4(struct __sk_buff *skb, const struct packet *p,
					 enum side side, __be32 from, __be32 to)
{
	__u32 offset = p->l3 + (side == SIDE_SRC ? offsetof(struct iphdr, saddr)
						 : offsetof(struct iphdr, daddr));
	__u64 flags;
	__u32 checksum = checksum_offset(p, &flags);
	long err = 0;

	if (packet_has_l4(p) && p->protocol != IPPROTO_ICMP) /* which has no pseudo header */
		err = bpf_l4_csum_replace(skb, checksum, from, to,
					  flags | BPF_F_PSEUDO_HDR | sizeof(to));
	if (!err)
		err = bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check), from, to,
					  sizeof(to));
	return err ?: bpf_skb_store_bytes(skb, offset, &to, sizeof(to), 0);
}

static __always_inline long rewrite_ipv6(struct __sk_buff *skb, const struct packet *p,
					 enum side side, const struct addr *from,
					 const struct addr *to)
{
	__u32 offset = p->l3 + (side == SIDE_SRC ? offsetof(struct ipv6hdr, saddr)
						 : offsetof(struct ipv6hdr, daddr));
	__s64 diff = bpf_csum_diff((__be32 *)from, sizeof(*from), (__be32 *)to, sizeof(*to), 0);
	__u64 flags;
	__u32 checksum = checksum_offset(p, &flags);
	long err = 0;

	if (packet_has_l4(p))
		err = csum_replace_pseudo_ipv6(skb, checksum, diff, flags);
	return err ?: bpf_skb_store_bytes(skb, offset, to, sizeof(*to), 0);
}

static __always_inline long rewrite_port(struct __sk_buff *skb, const struct packet *p,
					 enum side side, __be16 from, __be16 to)
{
	__u64 flags;
	__u32 checksum = checksum_offset(p, &flags);
	long err = bpf_l4_csum_replace(skb, checksum, from, to, flags | sizeof(to));

	return err ?: bpf_skb_store_bytes(skb, port_offset(p, side), &to, sizeof(to), 0);
}

/* What translation changes in IPv4 without options: one store instead of three. */
struct tuple4 {
	__u16 align;
	__sum16 check;
	__be32 addr[2];
	struct l4_start l4;
};

static __always_inline bool is_plain_ipv4(const struct packet *p)
{
	return !p->ipv6 && is_tcp_or_udp(p->protocol) && packet_has_l4(p) &&
	       p->l4 == p->l3 + sizeof(struct iphdr);
}

static __always_inline long rewrite_plain_ipv4(struct __sk_buff *skb, const struct packet *p,
					       enum side side, __be32 to, __be16 port)
{
	struct iphdr *ip = linear_at(skb, p->l3, sizeof(*ip));
	struct tuple4 tuple = {};
	__u32 len, diff;

	if (!ip)
		return -EINVAL;
	tuple.check = ip->check;
	tuple.addr[0] = ip->saddr;
	tuple.addr[1] = ip->daddr;
	len = l4_start_read(skb, p, &tuple.l4);
	if (!len)
		return -EINVAL;
	if (side == SIDE_SRC) {
		diff = csum_add_diff32(0, tuple.addr[0], to);
		tuple.addr[0] = to;
	} else {
		diff = csum_add_diff32(0, tuple.addr[1], to);
		tuple.addr[1] = to;
	}
	tuple.check = csum_fold((__u16)~tuple.check + diff);
	return l4_start_translate(skb, p, &tuple.l4, len, side, diff, port)
		       ?: bpf_skb_store_bytes(skb, p->l3 + offsetof(struct iphdr, check),
					      &tuple.check, 10 + len, 0);
}

/*
 * Replaces the address and port of one side of the packet in pkt_scratch by its new ones. Returns 0 or a negative
 * error, after which the packet may be half rewritten and must be dropped. A global function: the verifier checks it
 * once, and not for each of its many callers.
 */
__noinline int rewrite_side(struct __sk_buff *skb, __u32 side)
{
	const struct packet *p = pkt_scratch_get();
	const struct addr *from, *to;
	__u16 from_port, port;
	long err = 0;

	if (!p)
		return -EINVAL;
	from = side == SIDE_SRC ? &p->src : &p->dst;
	from_port = side == SIDE_SRC ? p->sport : p->dport;
	to = &p->decided.new_addr;
	port = p->decided.new_port;
	if (p->icmp_error)
		return rewrite_icmp_error(skb, p, side, to, port);
	if (is_plain_ipv4(p))
		return rewrite_plain_ipv4(skb, p, side, addr_ipv4(to), bpf_htons(port));
	if (!addr_equal(from, to))
		err = p->ipv6 ? rewrite_ipv6(skb, p, side, from, to)
			      : rewrite_ipv4(skb, p, side, addr_ipv4(from), addr_ipv4(to));
	if (!err && packet_has_l4(p) && from_port != port)
		err = rewrite_port(skb, p, side, bpf_htons(from_port), bpf_htons(port));
	return err;
}

/* The same by addr:port, which become the new ones of p, the packet in pkt_scratch. */
static __always_inline int rewrite(struct __sk_buff *skb, struct packet *p, enum side side,
				   const struct addr *addr, __u16 port)
{
	packet_translate(p, addr, port);
	return rewrite_side(skb, side);
}

/* Decrements the TTL, as a router does, and updates the IPv4 header checksum (RFC 1141). */
static __always_inline long decrement_ttl(struct __sk_buff *skb, const struct packet *p)
{
	struct {
		__u8 ttl;
		__u8 protocol;
		__sum16 check;
	} header;
	__u32 offset = p->l3 + offsetof(struct iphdr, ttl), check;
	__u8 ttl = p->ttl - 1;

	if (p->ipv6)
		return bpf_skb_store_bytes(skb, p->l3 + offsetof(struct ipv6hdr, hop_limit), &ttl,
					   sizeof(ttl), BPF_F_RECOMPUTE_CSUM);
	if (bpf_skb_load_bytes(skb, offset, &header, sizeof(header)))
		return -EINVAL;
	check = header.check + bpf_htons(0x0100);
	header.check = check + (check >= 0xffff);
	header.ttl = ttl;
	return bpf_skb_store_bytes(skb, offset, &header, sizeof(header), 0);
}
