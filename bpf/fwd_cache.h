/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The short way of a packet past the stack: that of one like it a moment ago. All
 * that decides about it, from the routing table to the life of the entries, is asked
 * the long way, by one packet in a while.
 */
#pragma once

#include "rewrite.h"
#include "verdict.h"

#define FWD_CACHE_JIFFIES 50 /* 50 ms to half a second, as CONFIG_HZ has it */

/*
 * tc_index, between hooks: of a packet that goes out past the stack, by the long way
 * or the short one; and of a copy that is for the stack alone. A container could set
 * the last one, and its packets would go through the stack.
 */
enum tag {
	TAG_NONE = 0,
	TAG_BYPASS = 0xeb,
	TAG_TRANSLATED = 0xebeb,
	TAG_CT_UPDATE = 0xec,
};

/* The length of p's segments, as they are on a wire. */
static __always_inline __u32 segment_length(struct __sk_buff *skb, const struct packet *p)
{
	return skb->gso_size && p->l4_payload ? p->l4_payload - p->l3 + skb->gso_size : p->len;
}

/* One hop less to live. The header checksum makes up for it (RFC 1141). */
static __always_inline long decrement_ttl(struct __sk_buff *skb, const struct packet *p)
{
	struct {
		__u8 ttl;
		__u8 protocol;
		__sum16 check;
	} next;
	__u32 offset = p->l3 + offsetof(struct iphdr, ttl), check;
	__u8 hops = p->ttl - 1;

	if (p->ipv6)
		return bpf_skb_store_bytes(skb, p->l3 + offsetof(struct ipv6hdr, hop_limit), &hops,
					   sizeof(hops), BPF_F_RECOMPUTE_CSUM);
	if (bpf_skb_load_bytes(skb, offset, &next, sizeof(next)))
		return -EINVAL;
	check = next.check + bpf_htons(0x0100);
	next.check = check + (check >= 0xffff);
	next.ttl = hops;
	return bpf_skb_store_bytes(skb, offset, &next, sizeof(next), 0);
}

/* What all packets of a connection have in common, as far as it is not about its begin or end. */
static __always_inline bool fwd_cacheable(const struct packet *p)
{
	if (!p->fast_eligible || p->ttl <= 1)
		return false;
	if (p->protocol == IPPROTO_TCP)
		return !p->tcp_syn && !p->tcp_synack && !p->tcp_fin && !p->tcp_rst;
	return p->protocol == IPPROTO_UDP;
}

/* Keeps the way of packets like p, of which key is p's beginning as it came in. */
static __noinline void fwd_cache_store(struct __sk_buff *skb, const struct packet *p,
				       const struct fwd_key *key, struct fwd_entry *way)
{
	struct fwd_entry *known;

	if (!fwd_cacheable(p))
		return;
	known = bpf_map_lookup_elem(&fwd_cache, key);
	way->updated = bpf_jiffies64();
	way->max_len = segment_length(skb, p);
	if (known && known->max_len > way->max_len && known->ifindex == way->ifindex)
		way->max_len = known->max_len;
	bpf_map_update_elem(&fwd_cache, key, way, BPF_ANY);
}

/* The headers that IPv4 over Ethernet changes on its way: one store instead of one for each. */
struct fwd_headers4 {
	__u16 align;
	struct ethhdr ether;
	struct iphdr ip;
	__be16 sport;
	__be16 dport;
};

/* One's complement sum, with from taken out and to put in. */
static __always_inline __u32 csum_add_diff32(__u32 sum, __be32 from, __be32 to)
{
	return sum + (__u16)~from + (__u16) ~(from >> 16) + (__u16)to + (to >> 16);
}

static __always_inline __sum16 csum_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}

/* Writes the translated address and port into head, and mends the L4 checksum. */
static __always_inline long fwd_translate4(struct __sk_buff *skb, const struct packet *p,
					   const struct fwd_entry *way, struct fwd_headers4 *head,
					   __u32 *sum)
{
	__be32 *addr = way->nat_side == SIDE_SRC ? &head->ip.saddr : &head->ip.daddr;
	__be16 *port = way->nat_side == SIDE_SRC ? &head->sport : &head->dport;
	__be32 from = *addr, to = addr_ipv4(&way->nat_addr);
	__be16 from_port = *port, host_port_forward = bpf_htons(way->nat_port);
	__u64 flags;
	__u32 checksum = checksum_offset(p, &flags);

	*sum = csum_add_diff32(*sum, from, to);
	*addr = to;
	*port = host_port_forward;
	return bpf_l4_csum_replace(skb, checksum, from, to, flags | BPF_F_PSEUDO_HDR | 4)
		       ?: bpf_l4_csum_replace(skb, checksum, from_port, host_port_forward,
					      flags | 2);
}

/* rewrite, decrement_ttl and the frame's addresses in one. What goes out gets others of those yet. */
static __noinline long fwd_rewrite4(struct __sk_buff *skb, const struct packet *p,
				    const struct fwd_entry *way)
{
	void *at = linear_at(skb, ETH_HLEN, sizeof(struct iphdr) + 4);
	struct fwd_headers4 head = {};
	__u32 sum;

	if (!at)
		return -EINVAL;
	head.ip = *(struct iphdr *)at;
	__builtin_memcpy(&head.sport, at + sizeof(head.ip), 4);
	head.ip.ttl--;
	sum = (__u16)~head.ip.check + (__u16)~bpf_htons(0x0100);
	if (way->nat && fwd_translate4(skb, p, way, &head, &sum))
		return -EINVAL;
	head.ip.check = csum_fold(sum);
	__builtin_memcpy(&head.ether, &way->next_hop, 2 * ETH_ALEN);
	head.ether.h_proto = bpf_htons(ETH_P_IP);
	return bpf_skb_store_bytes(skb, 0, &head.ether, sizeof(head) - sizeof(head.align), 0);
}

static __always_inline long fwd_rewrite6(struct __sk_buff *skb, const struct packet *p,
					 const struct fwd_entry *way)
{
	long err = decrement_ttl(skb, p);

	if (!err && way->nat)
		err = rewrite(skb, p, way->nat_side, &way->nat_addr, way->nat_port);
	if (!err && !way->family)
		err = bpf_skb_store_bytes(skb, 0, &way->next_hop, 2 * ETH_ALEN, 0);
	return err;
}

static __always_inline int fwd_redirect(struct __sk_buff *skb, const struct fwd_entry *way)
{
	if (!way->family)
		return bpf_redirect_peer(way->ifindex, 0);
	skb->tc_index = TAG_TRANSLATED;
	return bpf_redirect_neigh(way->ifindex, (void *)&way->family,
				  sizeof(struct bpf_redir_neigh), 0);
}

/* Sends p the short way. VERDICT_NEXT: there is none. */
static __noinline int fwd_cache_forward(struct __sk_buff *skb, const struct packet *p)
{
	struct fwd_entry *way;

	if (!fwd_cacheable(p) || skb->pkt_type != PACKET_HOST)
		return VERDICT_NEXT;
	way = bpf_map_lookup_elem(&fwd_cache, p);
	if (!way || (__u32)bpf_jiffies64() - way->updated >= FWD_CACHE_JIFFIES ||
	    segment_length(skb, p) > way->max_len)
		return VERDICT_NEXT;
	if (p->ipv6 ? fwd_rewrite6(skb, p, way) : fwd_rewrite4(skb, p, way))
		return drop(skb, REASON_REWRITE);
	return fwd_redirect(skb, way);
}
