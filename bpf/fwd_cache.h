/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The forwarding cache: the decision for a connection's last packet, reused for its next
 * ones. Either the packet was translated and redirected past the stack, or it went
 * through the stack and is counted, because short connections are not offloaded. The
 * generation of the plugin's maps (endpoints, policies, host ports) is checked for every
 * packet. Flows, routes and neighbors are checked for one packet every few jiffies.
 *
 * Each CPU has a cache of its own: no lock, no shared cache line, and no entry that
 * another CPU has written in part. The programs run with softirqs disabled, so they do
 * not interrupt one another.
 */
#pragma once

#include "checksum.h"
#include "endpoint.h"
#include "fib.h"
#include "rewrite.h"
#include "tag.h"
#include "tuple_hint.h"
#include "verdict.h"

#define FWD_NEW_JIFFIES 4 /* no longer: another CPU may offload the connection meanwhile */

/* Reports whether p's connection may have an entry. */
static __always_inline bool fwd_cacheable(const struct packet *p)
{
	return p->fast_eligible && p->ttl > 1 && !p->remapped && !p->uncached && !p->first &&
	       is_tcp_or_udp(p->protocol);
}

/* Reports whether p opens or closes its connection: then only entries with FWD_EVERY_TCP apply. */
static __always_inline bool fwd_changes_state(const struct packet *p)
{
	return p->tcp_syn || p->tcp_synack || p->tcp_fin || p->tcp_rst;
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
	return (__u32)bpf_jiffies64() - entry->updated < config.cache_jiffies &&
	       entry->generation == generation_get();
}

/* The keys are aligned as __u64. */
static __always_inline bool fwd_key_equal(const struct fwd_key *a, const struct fwd_key *b)
{
	const __u64 *x = (const __u64 *)a, *y = (const __u64 *)b;

	return !((x[0] ^ y[0]) | (x[1] ^ y[1]) | (x[2] ^ y[2]) | (x[3] ^ y[3]) | (x[4] ^ y[4]) |
		 (*(const __u32 *)&a->protocol ^ *(const __u32 *)&b->protocol));
}

/* Returns the entry of a way of the bucket. NULL only for the verifier. */
static __always_inline struct fwd_entry *fwd_entry_at(__u32 bucket, __u32 way)
{
	__u32 place = bucket * FWD_WAYS + way;

	return bpf_map_lookup_elem(&fwd_cache, &place);
}

static __always_inline __u32 fwd_bucket_of(__u32 id)
{
	return (id >> 1) % FWD_BUCKETS;
}

/* This CPU's entry with the key, which has the id; or NULL. It may be out of date. */
static __always_inline struct fwd_entry *fwd_cache_lookup(const struct fwd_key *key, __u32 id)
{
	__u32 bucket = fwd_bucket_of(id), way = 0;
	struct fwd_ways *ways = bpf_map_lookup_elem(&fwd_ways, &bucket);
	struct fwd_entry *entry;

	if (!ways)
		return NULL;
	if (ways->id[0] != id) {
		if (ways->id[1] != id)
			return NULL;
		way = 1;
	}
	entry = fwd_entry_at(bucket, way);
	if (!entry || !fwd_key_equal(&entry->key, key))
		return NULL;
	if (ways->last != way)
		ways->last = way;
	return entry;
}

/* This CPU's entry for p, or NULL. */
static __always_inline struct fwd_entry *fwd_cache_find(const struct packet *p)
{
	return fwd_cache_lookup(packet_tuple(p), p->id);
}

/* A place for the id's key: its own, or that of the way that was not used last. */
static __always_inline struct fwd_entry *fwd_cache_place(__u32 id)
{
	__u32 bucket = fwd_bucket_of(id), way;
	struct fwd_ways *ways = bpf_map_lookup_elem(&fwd_ways, &bucket);

	if (!ways)
		return NULL;
	way = !ways->last;
	if (ways->id[0] == id)
		way = 0;
	else if (ways->id[1] == id)
		way = 1;
	if (way)
		ways->id[1] = id;
	else
		ways->id[0] = id;
	ways->last = way;
	return fwd_entry_at(bucket, way);
}

/*
 * Reports whether the frame has the MAC address that anti-spoofing requires. The key covers
 * the rest.
 */
static __always_inline bool fwd_mac_matches(struct __sk_buff *skb, const struct fwd_entry *entry)
{
	struct ethhdr *eth = linear_at(skb, 0, sizeof(*eth));

	return eth && mac_equal(eth->h_source, entry->src_mac);
}

/* Reports whether the connection is so new that no CPU can have offloaded it. */
static __always_inline bool fwd_entry_is_new(const struct fwd_entry *entry)
{
	return entry->flags & FWD_NEW && entry->budget &&
	       (__u32)bpf_jiffies64() - entry->updated < FWD_NEW_JIFFIES;
}

/*
 * Returns the entry that applies to p, or NULL, also if an ingress policy has to track p
 * first. Records p: the TCP numbers by which the end of the connection is recognized, or
 * one more packet through the stack.
 */
static __noinline struct fwd_entry *fwd_cache_take(struct __sk_buff *skb, const struct packet *p,
						   bool tracked)
{
	struct fwd_entry *entry;

	if (!fwd_cacheable(p) || skb->pkt_type != PACKET_HOST)
		return NULL;
	entry = fwd_cache_find(p);
	if (!entry || !fwd_entry_is_current(entry) || (entry->flags & FWD_TRACK && !tracked) ||
	    (entry->flags & FWD_CHECK_MAC && !fwd_mac_matches(skb, entry)))
		return NULL;
	if (!entry->ifindex) {
		if (entry->flags & FWD_COUNTER || p->tcp_syn || p->tcp_synack)
			return NULL;
		if (entry->budget == FWD_NO_LIMIT)
			return entry;
		if (!fwd_entry_is_new(entry))
			return NULL;
		entry->budget--;
		return entry;
	}
	if (packet_segment_len(skb, p) > entry->max_len ||
	    (fwd_changes_state(p) && !(entry->flags & FWD_EVERY_TCP)) ||
	    (entry->hint_id &&
	     !tuple_hint_renew(entry->hint_id, entry->family ? p->ack : packet_seq_end(p))))
		return NULL;
	return entry;
}

/*
 * Creates an entry for p that leaves it to the stack, until the caller changes it.
 * NULL: p gets none. The maximum length is not copied from an older decision, because the
 * route may have a smaller MTU now.
 */
static __noinline struct fwd_entry *fwd_cache_store(struct __sk_buff *skb, const struct packet *p)
{
	const struct fwd_key *key = packet_tuple(p);
	struct fwd_entry *entry;
	struct device *device;
	__u32 ifindex = key->ifindex;

	if (!fwd_cacheable(p))
		return NULL;
	entry = fwd_cache_place(p->id);
	if (!entry)
		return NULL;
	entry->key = *key;
	entry->ifindex = 0;
	entry->updated = bpf_jiffies64();
	entry->generation = generation_get();
	entry->max_len = packet_segment_len(skb, p);
	entry->flags = 0;
	entry->hint_id = 0;
	device = device_lookup(ifindex);
	if (device && device->flags & DEVICE_ANTI_SPOOF) {
		entry->flags |= FWD_CHECK_MAC;
		__builtin_memcpy(entry->src_mac, device->mac, sizeof(entry->src_mac));
	}
	if (device && device->ingress_policy != POLICY_OPEN)
		entry->flags |= FWD_TRACK;
	return entry;
}

/* Has the entry translate that side of its packets to addr:port, if it differs. */
static __always_inline void fwd_entry_translate(struct fwd_entry *entry, enum side side,
						const struct addr *addr, __u16 port)
{
	const struct addr *old = side == SIDE_SRC ? &entry->key.src : &entry->key.dst;

	if (port == (side == SIDE_SRC ? entry->key.sport : entry->key.dport) &&
	    addr_equal(addr, old))
		return;
	entry->flags |= side == SIDE_SRC ? FWD_NAT | FWD_NAT_SRC : FWD_NAT;
	entry->nat_addr = *addr;
	entry->nat_port = port;
}

/* Voids the entry of p, which is too long for its route: the route may have changed. */
static __always_inline void fwd_cache_remove(const struct packet *p)
{
	struct fwd_entry *entry = fwd_cache_find(p);

	if (entry)
		entry->updated = (__u32)bpf_jiffies64() - config.cache_jiffies;
}

/*
 * Reports whether the last hook has to record the delivery of the connection's packets: not for the
 * first budget ones, nor while another CPU, which has the entry of the first packet, may leave
 * packets unrecorded.
 */
static __always_inline bool fwd_entry_observes(const struct fwd_entry *entry)
{
	return !entry->budget && (entry->flags & FWD_NEW || entry->key.protocol != IPPROTO_TCP ||
				  (__u32)bpf_jiffies64() - entry->updated >= FWD_NEW_JIFFIES);
}

/* Counts p, which goes through the stack with the tag. Returns what fwd_entry_observes does. */
static __always_inline bool fwd_cache_count(struct __sk_buff *skb, const struct packet *p,
					    __u32 tag, __u32 budget)
{
	struct fwd_entry *entry = p->first ? NULL : fwd_cache_find(p);
	bool opens = p->tcp_syn || p->tcp_synack;
	__u8 flags = p->stack_cacheable ? 0 : FWD_COUNTER;

	if (p->first)
		return false;
	if (entry && entry->ifindex && !opens) /* has bypassed the stack before */
		return true;
	if (opens || (!entry && p->protocol == IPPROTO_UDP))
		flags |= FWD_NEW;
	else if (entry)
		budget = entry->budget;
	if (entry && !opens && budget && budget != FWD_NO_LIMIT)
		entry->budget = --budget;
	if (entry && !opens && fwd_entry_is_current(entry))
		return fwd_entry_observes(entry);
	entry = fwd_cache_store(skb, p);
	if (!entry)
		return true;
	entry->tag = tag;
	entry->budget = budget;
	entry->flags |= flags;
	return !budget;
}

/* Reports whether the connection of the packet in pkt_scratch is new, and not offloaded. */
__noinline int fwd_cache_is_new(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry = p ? fwd_cache_find(p) : NULL;

	USE_ARGUMENT(skb);
	return entry && !entry->ifindex && fwd_entry_is_new(entry) && fwd_entry_is_current(entry);
}

/* Returns the entry of from_container for p, which to_uplink sends; or NULL. */
static __always_inline struct fwd_entry *fwd_cache_lookup_sent(struct __sk_buff *skb,
							       struct packet *p)
{
	struct fwd_entry *entry;

	p->ifindex = skb->ingress_ifindex;
	entry = fwd_cache_find(p);
	p->ifindex = skb->ifindex;
	return entry;
}

/* Stores the new source of p, which the stack has forwarded, for the connection's next packets. */
static __noinline void fwd_cache_record_source(struct __sk_buff *skb, struct packet *p)
{
	struct fwd_entry *entry = fwd_cache_lookup_sent(skb, p);

	if (entry && !entry->ifindex)
		fwd_entry_translate(entry, SIDE_SRC, &p->new_addr, p->new_port);
}

/*
 * Returns the entry with the new source of the last packet of p's connection, or NULL. It is
 * only a hint: the flow may be gone or belong to another connection.
 */
static __noinline struct fwd_entry *fwd_cache_recent_source(struct __sk_buff *skb, struct packet *p)
{
	struct fwd_entry *entry = fwd_cacheable(p) ? fwd_cache_lookup_sent(skb, p) : NULL;

	return entry && entry->flags & FWD_NAT && fwd_entry_is_current(entry) ? entry : NULL;
}

#define TCP_UNACKED (1U << 18) /* bytes that a receiver leaves unacknowledged */

/*
 * Reports whether the packet in pkt_scratch, a RST or FIN under a remote's address, has the
 * expected sequence number; its new address is the container. ack and seq_end are from the
 * flow: what the container last acknowledged, and the end of the remote's last packet. The
 * hints may have later ones. The container's next packet is decided in full, so that the
 * reply is tracked.
 */
__noinline int fwd_cache_end_expected(struct __sk_buff *skb, __u32 ack, __u32 seq_end)
{
	struct packet *p = pkt_scratch_get();
	__u32 reply, hint;

	USE_ARGUMENT(skb);
	if (!p)
		return false;
	reply = reply_id(p, &p->new_addr, p->new_port);
	hint = tuple_hint_take(reply, ack);
	if ((__s32)(hint - ack) > 0)
		ack = hint;
	hint = tuple_hint_read(p->id, seq_end);
	/* RFC 5961, 3.2. The remote's last packets may not be acknowledged yet. */
	return p->seq == ack ||
	       ((p->seq == seq_end || p->seq == hint) && p->seq - ack < TCP_UNACKED);
}

/*
 * Stores the decision for the packet in pkt_scratch, which bypasses the stack to the
 * container at its new destination, for the next packets of its connection.
 */
__noinline int fwd_cache_store_ingress(struct __sk_buff *skb, __u32 flags)
{
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry;
	struct endpoint *to;

	if (!p)
		return 0;
	to = endpoint_lookup(&p->new_addr);
	entry = to ? fwd_cache_store(skb, p) : NULL;
	if (!entry)
		return 0;
	fwd_entry_translate(entry, SIDE_DST, &p->new_addr, p->new_port);
	entry->flags |= flags;
	entry->family = 0;
	__builtin_memcpy(&entry->next_hop, to->mac, sizeof(to->mac) + sizeof(to->host_mac));
	entry->ifindex = to->ifindex;
	if (p->protocol == IPPROTO_TCP && !device_lookup(p->ifindex)) {
		entry->hint_id = p->id;
		tuple_hint_write(entry->hint_id, packet_seq_end(p));
	}
	return 0;
}

/*
 * Called by to_uplink for the packet in pkt_scratch, which bypasses the stack and has its new
 * source: stores the decision for from_container.
 */
__noinline int fwd_cache_store_egress(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry;
	struct next_hop next;

	if (!p || fwd_changes_state(p) || !fwd_cacheable(p) ||
	    fib_next_hop(skb, p, skb->ingress_ifindex, packet_segment_len(skb, p), &next) ||
	    next.ifindex != skb->ifindex)
		return 0;
	p->ifindex = skb->ingress_ifindex;
	entry = fwd_cache_store(skb, p);
	p->ifindex = skb->ifindex;
	if (!entry)
		return 0;
	fwd_entry_translate(entry, SIDE_SRC, &p->new_addr, p->new_port);
	entry->family = next.neigh.nh_family;
	__builtin_memcpy(&entry->next_hop, next.neigh.ipv6_nh, sizeof(entry->next_hop));
	if (next.tunnel) {
		entry->flags |= FWD_NODE;
		entry->remote = entry->next_hop;
		if (bpf_skb_load_bytes(skb, 0, &entry->next_hop, 2 * ETH_ALEN))
			return 0; /* and the entry says: by the stack */
	}
	if (p->protocol == IPPROTO_TCP) {
		entry->hint_id = p->id;
		tuple_hint_write(entry->hint_id, p->ack);
	}
	entry->ifindex = skb->ifindex;
	return 0;
}

/* All headers that forwarding changes in IPv4 over Ethernet: one store instead of many. */
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
	__be32 *addr = entry->flags & FWD_NAT_SRC ? &headers->ip.saddr : &headers->ip.daddr;
	__be16 *port = entry->flags & FWD_NAT_SRC ? &headers->sport : &headers->dport;
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
	if (entry->flags & FWD_NAT && fwd_translate4(skb, p, entry, &headers, &ip_sum))
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

	if (!err && entry->flags & FWD_NAT)
		err = rewrite(skb, p, entry->flags & FWD_NAT_SRC ? SIDE_SRC : SIDE_DST,
			      &entry->nat_addr, entry->nat_port);
	if (!err && !entry->family)
		err = bpf_skb_store_bytes(skb, 0, &entry->next_hop, 2 * ETH_ALEN, 0);
	return err;
}

static __always_inline int fwd_redirect(struct __sk_buff *skb, const struct fwd_entry *entry)
{
	if (!entry->family)
		return bpf_redirect_peer(entry->ifindex, 0);
	skb->tc_index = TAG_TRANSLATED;
	if (entry->flags & FWD_NODE)
		return node_redirect(skb, &entry->remote);
	return bpf_redirect_neigh(entry->ifindex, (void *)&entry->family,
				  sizeof(struct bpf_redir_neigh), 0);
}

/* Forwards the packet in pkt_scratch by its entry. NOT_HANDLED: none applies (fwd_cache_take). */
__noinline int fwd_cache_forward(struct __sk_buff *skb, __u32 tracked)
{
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry;

	if (!p)
		return NOT_HANDLED;
	if (p->tcp_syn || p->tcp_synack)
		tuple_hint_clear(p);
	entry = fwd_cache_take(skb, p, tracked);
	if (!entry)
		return NOT_HANDLED;
	if (!entry->ifindex) {
		skb->tc_index = entry->tag;
		return VERDICT_NEXT;
	}
	if (p->ipv6 ? fwd_rewrite6(skb, p, entry) : fwd_rewrite4(skb, p, entry))
		return drop(skb, REASON_REWRITE);
	return fwd_redirect(skb, entry);
}
