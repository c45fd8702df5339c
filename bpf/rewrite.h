/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Writes translated addresses, ports and the TTL into a packet, and updates its checksums. */
#pragma once

#include "l4_start.h"
#include "rewrite_error.h"

/* Returns the difference between the addresses, which the checksum of TCP, UDP and ICMPv6 covers. */
static __always_inline __u32 rewrite_addr_diff(const struct packet *p, const struct addr *from,
					       const struct addr *to)
{
	return p->ipv6 ? csum_diff_addr(from, to)
		       : csum_add_diff32(0, addr_ipv4(from), addr_ipv4(to));
}

static __always_inline long rewrite_addr(struct __sk_buff *skb, const struct packet *p,
					 enum side side, const struct addr *from,
					 const struct addr *to)
{
	__u32 offset =
		side == SIDE_SRC ? offsetof(struct iphdr, saddr) : offsetof(struct iphdr, daddr);
	__be32 to4 = addr_ipv4(to);
	long err;

	if (p->ipv6) {
		offset = side == SIDE_SRC ? offsetof(struct ipv6hdr, saddr)
					  : offsetof(struct ipv6hdr, daddr);
		return bpf_skb_store_bytes(skb, p->l3 + offset, to, sizeof(*to), 0);
	}
	err = bpf_l3_csum_replace(skb, p->l3 + offsetof(struct iphdr, check), addr_ipv4(from), to4,
				  sizeof(to4));
	return err ?: bpf_skb_store_bytes(skb, p->l3 + offset, &to4, sizeof(to4), 0);
}

/* diff is that of the address. */
static __always_inline long rewrite_ports(struct __sk_buff *skb, const struct packet *p,
					  enum side side, __u32 diff, __be16 port)
{
	struct l4_start l4 = {};
	__u32 len = l4_start_read(skb, p, &l4);

	if (!len)
		return -EINVAL;
	return l4_start_translate(skb, p, &l4, len, side, diff, port)
		       ?: bpf_skb_store_bytes(skb, p->l4, &l4, len, 0);
}

/* An echo message has one identifier for both sides. */
static __always_inline long rewrite_echo(struct __sk_buff *skb, const struct packet *p, __u32 diff,
					 __be16 from, __be16 to)
{
	__u32 checksum = p->l4 + offsetof(struct echohdr, checksum);
	long err = 0;

	if (p->ipv6) /* ICMP has no pseudo header */
		err = csum_replace_pseudo_ipv6(skb, checksum, diff, 0);
	if (err || from == to)
		return err;
	err = bpf_l4_csum_replace(skb, checksum, from, to, sizeof(to));
	return err
		       ?: bpf_skb_store_bytes(skb, p->l4 + offsetof(struct echohdr, id), &to,
					      sizeof(to), 0);
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
	__u32 diff;
	long err;

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
	diff = rewrite_addr_diff(p, from, to);
	err = rewrite_addr(skb, p, side, from, to);
	if (err || !packet_has_l4(p))
		return err;
	if (is_tcp_or_udp(p->protocol))
		return rewrite_ports(skb, p, side, diff, bpf_htons(port));
	return rewrite_echo(skb, p, diff, bpf_htons(from_port), bpf_htons(port));
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
