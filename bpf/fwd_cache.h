/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The forwarding cache: how a connection's last packet was translated and redirected
 * past the stack, for its next ones. What the plugin has decided (endpoints,
 * policies, host ports) is checked for every packet, by its generation. All else
 * (flows, routes, neighbors) is checked again for one packet every few jiffies.
 */
#pragma once

#include "checksum.h"
#include "endpoint.h"
#include "fib.h"
#include "rewrite.h"
#include "tag.h"
#include "verdict.h"

#define FWD_CACHE_JIFFIES 50 /* 50 ms to half a second, depending on CONFIG_HZ */

/* p could be any packet of its connection: it neither opens nor closes it. */
static __always_inline bool fwd_cacheable(const struct packet *p)
{
	if (!p->fast_eligible || p->ttl <= 1 || p->remapped)
		return false;
	if (p->protocol == IPPROTO_TCP)
		return !p->tcp_syn && !p->tcp_synack && !p->tcp_fin && !p->tcp_rst;
	return p->protocol == IPPROTO_UDP;
}

/* The present generation of the plugin's maps. */
static __always_inline __u32 generation_get(void)
{
	__u32 zero = 0;
	__u64 *number = bpf_map_lookup_elem(&generation, &zero);

	return number ? *number : 0;
}

static __always_inline bool fwd_entry_is_current(const struct fwd_entry *entry)
{
	return (__u32)bpf_jiffies64() - entry->updated < FWD_CACHE_JIFFIES &&
	       entry->generation == generation_get();
}

/* Notes the numbers of a TCP packet, by which the end of the connection is known. */
static __always_inline void fwd_entry_note(struct fwd_entry *entry, const struct packet *p)
{
	if (p->protocol != IPPROTO_TCP)
		return;
	entry->ack = p->ack;
	entry->seq_end = packet_seq_end(p);
}

/*
 * Stores the decision about p, whose key is that of the hook that received it. The
 * longest packet is not taken over from an older decision: the route may have a
 * smaller MTU now.
 */
static __noinline void fwd_cache_store(struct __sk_buff *skb, const struct packet *p,
				       const struct fwd_key *key, struct fwd_entry *entry)
{
	if (!fwd_cacheable(p))
		return;
	entry->max_len = packet_segment_len(skb, p);
	entry->updated = bpf_jiffies64();
	entry->generation = generation_get();
	fwd_entry_note(entry, p);
	bpf_map_update_elem(&fwd_cache, key, entry, BPF_ANY);
}

/* p is too long for its route, which may have changed. */
static __always_inline void fwd_cache_remove(const struct packet *p)
{
	bpf_map_delete_elem(&fwd_cache, p);
}

#define TCP_UNACKED (1U << 18) /* bytes that a receiver leaves unacknowledged */

/*
 * Whether p, a RST or FIN in a remote's name, has the number that its sender would
 * use. ack is what the container has acknowledged last, and seq_end the end of the
 * remote's last packet, as far as its flow knows; the forwarding cache has seen
 * later packets. The container's entry becomes void, so that its reply is tracked.
 */
static __noinline bool fwd_cache_end_expected(const struct packet *p,
					      const struct fwd_key *container, __u32 ack,
					      __u32 seq_end)
{
	struct fwd_entry *entry = bpf_map_lookup_elem(&fwd_cache, container);

	if (entry) {
		ack = entry->ack;
		entry->updated = (__u32)bpf_jiffies64() - FWD_CACHE_JIFFIES;
	}
	entry = bpf_map_lookup_elem(&fwd_cache, p);
	if (entry)
		seq_end = entry->seq_end;
	/* RFC 5961, 3.2. What was sent just before is not acknowledged yet. */
	return p->seq == ack || (p->seq == seq_end && p->seq - ack < TCP_UNACKED);
}

/*
 * In to_uplink: p, which bypasses the stack, leaves from addr:port. The next packets
 * get that source in from_container.
 */
static __noinline void fwd_cache_store_egress(struct __sk_buff *skb, const struct packet *p,
					      const struct addr *addr, __u16 port)
{
	struct fwd_key key = *(const struct fwd_key *)p;
	struct fwd_entry entry = {
		.ifindex = skb->ifindex,
		.nat_side = SIDE_SRC,
		.nat_addr = *addr,
		.nat_port = port,
		.nat = port != p->sport || !addr_equal(addr, &p->src),
	};
	struct next_hop next;

	key.ifindex = skb->ingress_ifindex;
	if (p->remapped || fib_next_hop(skb, p, key.ifindex, packet_segment_len(skb, p), &next) ||
	    next.ifindex != skb->ifindex)
		return;
	entry.family = next.neigh.nh_family;
	__builtin_memcpy(&entry.next_hop, next.neigh.ipv6_nh, sizeof(entry.next_hop));
	fwd_cache_store(skb, p, &key, &entry);
}

/* All headers that forwarding changes in IPv4 over Ethernet: one store in the place of many. */
struct fwd_headers4 {
	__u16 align;
	struct ethhdr ether;
	struct iphdr ip;
	__be16 sport;
	__be16 dport;
};

/* Writes the translated address and port into headers, and updates the L4 checksum. */
static __always_inline long fwd_translate4(struct __sk_buff *skb, const struct packet *p,
					   const struct fwd_entry *entry,
					   struct fwd_headers4 *headers, __u32 *ip_sum)
{
	__be32 *addr = entry->nat_side == SIDE_SRC ? &headers->ip.saddr : &headers->ip.daddr;
	__be16 *port = entry->nat_side == SIDE_SRC ? &headers->sport : &headers->dport;
	__be32 old_addr = *addr, new_addr = addr_ipv4(&entry->nat_addr);
	__be16 old_port = *port, new_port = bpf_htons(entry->nat_port);
	__u64 flags;
	__u32 checksum = checksum_offset(p, &flags);

	*ip_sum = csum_add_diff32(*ip_sum, old_addr, new_addr);
	*addr = new_addr;
	*port = new_port;
	return bpf_l4_csum_replace(skb, checksum, old_addr, new_addr,
				   flags | BPF_F_PSEUDO_HDR | sizeof(new_addr))
		       ?: bpf_l4_csum_replace(skb, checksum, old_port, new_port,
					      flags | sizeof(new_port));
}

/*
 * rewrite, decrement_ttl and the MAC addresses in one. For a next hop, which has
 * no MAC addresses here, bpf_redirect_neigh writes them later.
 */
static __noinline long fwd_rewrite4(struct __sk_buff *skb, const struct packet *p,
				    const struct fwd_entry *entry)
{
	void *ip = linear_at(skb, ETH_HLEN, sizeof(struct iphdr) + 4);
	struct fwd_headers4 headers = {};
	__u32 ip_sum;

	if (!ip)
		return -EINVAL;
	headers.ip = *(struct iphdr *)ip;
	__builtin_memcpy(&headers.sport, ip + sizeof(headers.ip), 4);
	headers.ip.ttl--;
	ip_sum = (__u16)~headers.ip.check + (__u16)~bpf_htons(0x0100);
	if (entry->nat && fwd_translate4(skb, p, entry, &headers, &ip_sum))
		return -EINVAL;
	headers.ip.check = csum_fold(ip_sum);
	__builtin_memcpy(&headers.ether, &entry->next_hop, 2 * ETH_ALEN);
	headers.ether.h_proto = bpf_htons(ETH_P_IP);
	return bpf_skb_store_bytes(skb, 0, &headers.ether, sizeof(headers) - sizeof(headers.align),
				   0);
}

static __always_inline long fwd_rewrite6(struct __sk_buff *skb, const struct packet *p,
					 const struct fwd_entry *entry)
{
	long err = decrement_ttl(skb, p);

	if (!err && entry->nat)
		err = rewrite(skb, p, entry->nat_side, &entry->nat_addr, entry->nat_port);
	if (!err && !entry->family)
		err = bpf_skb_store_bytes(skb, 0, &entry->next_hop, 2 * ETH_ALEN, 0);
	return err;
}

static __always_inline int fwd_redirect(struct __sk_buff *skb, const struct fwd_entry *entry)
{
	if (!entry->family)
		return bpf_redirect_peer(entry->ifindex, 0);
	skb->tc_index = TAG_TRANSLATED;
	return bpf_redirect_neigh(entry->ifindex, (void *)&entry->family,
				  sizeof(struct bpf_redir_neigh), 0);
}

/* Forwards p by its entry. VERDICT_NEXT: no current entry. */
static __noinline int fwd_cache_forward(struct __sk_buff *skb, const struct packet *p)
{
	struct fwd_entry *entry;

	if (!fwd_cacheable(p) || skb->pkt_type != PACKET_HOST)
		return VERDICT_NEXT;
	entry = bpf_map_lookup_elem(&fwd_cache, p);
	if (!entry || packet_segment_len(skb, p) > entry->max_len || !fwd_entry_is_current(entry))
		return VERDICT_NEXT;
	fwd_entry_note(entry, p);
	if (p->ipv6 ? fwd_rewrite6(skb, p, entry) : fwd_rewrite4(skb, p, entry))
		return drop(skb, REASON_REWRITE);
	return fwd_redirect(skb, entry);
}
