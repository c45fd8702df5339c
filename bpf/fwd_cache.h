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
#include "conntrack.h"
#include "fwd_stack.h"
#include "fwd_track.h"
#include "node.h"
#include "rewrite.h"
#include "verdict.h"

/*
 * Reports whether the frame has the MAC address that anti-spoofing requires. The key covers
 * the rest.
 */
static __always_inline bool fwd_mac_matches(struct __sk_buff *skb, const struct fwd_entry *entry)
{
	struct ethhdr *eth = linear_at(skb, 0, sizeof(*eth));

	return eth && mac_equal(eth->h_source, entry->src_mac);
}

/*
 * Returns the entry that applies to p, or NULL. Records p: the TCP numbers by which the end of the connection is recognized, or
 * one more packet through the stack.
 */
static __noinline struct fwd_entry *fwd_cache_take(struct __sk_buff *skb, const struct packet *p)
{
	struct fwd_entry *entry;

	if (!fwd_cacheable(p) || skb->pkt_type != PACKET_HOST)
		return NULL;
	entry = fwd_cache_find(p);
	if (!entry || !fwd_entry_is_current(entry) || !policy_entry_is_current(entry) ||
	    (entry->flags & FWD_CHECK_MAC && !fwd_mac_matches(skb, entry)))
		return NULL;
	if (entry->action == FWD_COUNT)
		return NULL;
	if (entry->action == FWD_STACK || entry->action == FWD_FLOW) {
		if (p->tcp_syn || p->tcp_synack)
			return NULL;
		if (entry->budget != FWD_NO_LIMIT) {
			if (!fwd_entry_is_new(entry, p))
				return NULL;
			entry->budget--;
		}
	} else if (packet_segment_len(skb, p) > entry->max_len ||
		   (fwd_changes_state(p) && !fwd_takes_change(entry, p)) ||
		   !fwd_renew_hint(entry, p)) {
		return NULL;
	}
	return fwd_tracks(entry, p) && !fwd_track(entry) ? NULL : entry;
}

/*
 * Has the entry translate its packets as conntrack does. That holds for at most 50 ms, a fourth of other decisions' time.
 */
static __always_inline void fwd_entry_translate_ct(struct fwd_entry *entry,
						   const struct ct_translation *t)
{
	if (ct_changes_src(t) && ct_changes_dst(t)) {
		entry->nat = FWD_NAT_BOTH;
		entry->nat_addr = t->out.dst;
		entry->nat_port = t->out.dport;
		entry->src_addr = t->out.src;
		entry->src_port = t->out.sport;
	} else {
		fwd_entry_translate(entry, SIDE_DST, &t->out.dst, t->out.dport);
		fwd_entry_translate(entry, SIDE_SRC, &t->out.src, t->out.sport);
	}
	entry->updated -= config.cache_jiffies - config.cache_jiffies / 4;
}

/*
 * Stores the decision for the packet in pkt_scratch, which bypasses the stack to the
 * container at its new destination, for the next packets of its connection. flags and flow_kind are those of the entry.
 */
__noinline int fwd_cache_store_ingress(struct __sk_buff *skb, __u32 flags, __u32 flow_kind)
{
	struct ct_translation *t = ct_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry;
	struct endpoint *to;

	if (!p)
		return 0;
	to = endpoint_lookup(&p->decided.new_addr);
	entry = to ? fwd_cache_store(skb, p) : NULL;
	if (!entry)
		return 0;
	if (p->decided.ct_nat && t)
		fwd_entry_translate_ct(entry, t);
	else
		fwd_entry_translate(entry, SIDE_DST, &p->decided.new_addr, p->decided.new_port);
	entry->flags |= flags;
	entry->flow_kind = flow_kind;
	entry->max_len = to->mtu;
	entry->action = FWD_CONTAINER;
	__builtin_memcpy(entry->macs, to->mac, sizeof(entry->macs));
	entry->ifindex = to->ifindex;
	if (!(flags & FWD_EVERY_TCP))
		fwd_leave_hint(entry, p);
	return 0;
}

/*
 * Creates the entry of from_container for p, which bypasses the stack and leaves by to_uplink; or returns NULL. If
 * from_container has translated p as conntrack does, the entry is that of the tuple before.
 */
static __noinline struct fwd_entry *fwd_cache_store_sent(struct __sk_buff *skb, struct packet *p,
							 const struct ct_translation *t,
							 bool translated)
{
	struct device *device = device_lookup(skb->ingress_ifindex);
	struct fwd_entry *entry;
	__u32 id = p->id;

	if (translated &&
	    (p->decided.new_port != p->sport || !addr_equal(&p->decided.new_addr, &p->src)))
		return NULL; /* it is masqueraded, too: an entry translates a side once */
	p->ifindex = skb->ingress_ifindex;
	if (translated) {
		packet_set_tuple(p, &t->in);
		packet_set_id(p);
	}
	entry = fwd_cache_store(skb, p);
	if (entry && device && device->flags & DEVICE_ANTI_SPOOF)
		fwd_entry_check_mac(entry, device->mac);
	if (entry && translated)
		fwd_entry_translate_ct(entry, t);
	else if (entry)
		fwd_entry_set_source(entry, p);
	if (entry)
		fwd_leave_hint(entry, p);
	if (translated)
		packet_set_tuple(p, &t->out);
	p->ifindex = skb->ifindex;
	p->id = id;
	return entry;
}

/* Has the entry send packets like the one in skb to the next hop. If that is impossible, the entry leaves them to the stack. */
static __always_inline void fwd_entry_set_next_hop(struct __sk_buff *skb, struct fwd_entry *entry,
						   const struct next_hop *next)
{
	if (!next->tunnel)
		entry->next_hop = next->neigh;
	else if (bpf_skb_load_bytes(skb, 0, entry->node.macs, sizeof(entry->node.macs)))
		return;
	else
		__builtin_memcpy(&entry->node.remote, next->neigh.ipv6_nh,
				 sizeof(entry->node.remote));
	entry->max_len = next->max_len;
	entry->ifindex = next->ifindex;
	entry->action = next->tunnel ? FWD_NODE : FWD_NEXT_HOP;
}

/*
 * Called by to_uplink for the packet in pkt_scratch, which bypasses the stack and has its new
 * source: stores the decision for from_container.
 */
__noinline int fwd_cache_store_egress(struct __sk_buff *skb)
{
	struct ct_translation *t = ct_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry;
	bool sent, translated;
	__u32 flow_kind;

	if (!p || !t)
		return 0;
	sent = t->sent && t->next.ifindex == skb->ifindex &&
	       ct_tuple_equal(&t->out, packet_tuple(p));
	t->sent = false;
	if (!sent)
		return 0;
	translated = ct_changes_src(t) || ct_changes_dst(t);
	flow_kind = p->decided.offloaded ? 0 : p->decided.flow_kind;
	if (!fwd_cacheable(p) || (fwd_changes_state(p) && !fwd_opens_tracked(p, flow_kind)))
		return 0;
	entry = fwd_cache_store_sent(skb, p, t, translated);
	if (!entry)
		return 0;
	entry->flow_kind = entry->nat ? flow_kind : 0;
	fwd_entry_set_next_hop(skb, entry, &t->next);
	return 0;
}

/*
 * Stores the decision for p, which from_container sends past the stack as it is, and of whose connection no state is recorded, for
 * all packets of the connection.
 */
static __noinline void fwd_cache_store_next_hop(struct __sk_buff *skb, const struct packet *p,
						const struct next_hop *next)
{
	struct fwd_entry *entry = fwd_cache_store(skb, p);

	if (!entry)
		return;
	entry->flags |= FWD_EVERY_TCP;
	fwd_entry_set_next_hop(skb, entry, next);
}

/* All headers that forwarding changes in IPv4 over Ethernet: one store instead of many. */
struct fwd_headers4 {
	__u16 align;
	struct ethhdr ether;
	struct iphdr ip;
	struct l4_start l4;
};

/*
 * rewrite, decrement_ttl and the MAC addresses in one. For a next hop, which has
 * no MAC addresses here, bpf_redirect_neigh writes them later.
 */
static __noinline long fwd_rewrite4(struct __sk_buff *skb, const struct packet *p,
				    const struct fwd_entry *entry)
{
	enum side side = entry->nat == FWD_NAT_SRC ? SIDE_SRC : SIDE_DST;
	__be32 addr = addr_ipv4(&entry->nat_addr);
	struct fwd_headers4 headers = {};
	__u32 sum, diff, len = 0;
	struct iphdr *ip = linear_at(skb, ETH_HLEN, sizeof(*ip));

	if (!ip)
		return -EINVAL;
	headers.ip = *ip;
	headers.ip.ttl--;
	sum = (__u16)~headers.ip.check + (__u16)~bpf_htons(0x0100);
	if (entry->nat) {
		len = l4_start_read(skb, p, &headers.l4);
		if (!len)
			return -EINVAL;
		if (side == SIDE_SRC) {
			diff = csum_add_diff32(0, headers.ip.saddr, addr);
			headers.ip.saddr = addr;
		} else {
			diff = csum_add_diff32(0, headers.ip.daddr, addr);
			headers.ip.daddr = addr;
		}
		sum += diff;
		if (l4_start_translate(skb, p, &headers.l4, len, side, diff,
				       bpf_htons(entry->nat_port)))
			return -EINVAL;
	}
	headers.ip.check = csum_fold(sum);
	__builtin_memcpy(&headers.ether, entry->macs, sizeof(entry->macs));
	headers.ether.h_proto = bpf_htons(ETH_P_IP);
	return bpf_skb_store_bytes(skb, 0, &headers.ether, ETH_HLEN + sizeof(*ip) + len, 0);
}

/* The same for IPv6. */
struct fwd_headers6 {
	__u16 align;
	struct ethhdr ether;
	struct ipv6hdr ip;
	struct l4_start l4;
};

/*
 * rewrite, decrement_ttl and the MAC addresses in one, of a packet without extension headers. A NIC's checksum of the whole
 * packet (CHECKSUM_COMPLETE) must follow the hop limit only: the L4 checksum makes up for the rest.
 */
static __noinline long fwd_translate6(struct __sk_buff *skb, const struct packet *p,
				      const struct fwd_entry *entry)
{
	enum side side = entry->nat == FWD_NAT_SRC ? SIDE_SRC : SIDE_DST;
	struct ipv6hdr *ip = linear_at(skb, ETH_HLEN, sizeof(*ip));
	struct fwd_headers6 headers = {};
	__u32 diff, len;

	if (!ip)
		return -EINVAL;
	headers.ip = *ip;
	headers.ip.hop_limit--;
	bpf_csum_update(skb, csum_add_diff32(0, bpf_htons(1), 0));
	__builtin_memcpy(&headers.ether, entry->macs, sizeof(entry->macs));
	headers.ether.h_proto = bpf_htons(ETH_P_IPV6);
	len = l4_start_read(skb, p, &headers.l4);
	if (!len)
		return -EINVAL;
	if (side == SIDE_SRC) {
		diff = csum_diff_addr(&p->src, &entry->nat_addr);
		__builtin_memcpy(&headers.ip.saddr, &entry->nat_addr, sizeof(headers.ip.saddr));
	} else {
		diff = csum_diff_addr(&p->dst, &entry->nat_addr);
		__builtin_memcpy(&headers.ip.daddr, &entry->nat_addr, sizeof(headers.ip.daddr));
	}
	if (l4_start_translate(skb, p, &headers.l4, len, side, diff, bpf_htons(entry->nat_port)))
		return -EINVAL;
	return bpf_skb_store_bytes(skb, 0, &headers.ether, ETH_HLEN + sizeof(*ip) + len, 0);
}

static __always_inline long fwd_rewrite6(struct __sk_buff *skb, struct packet *p,
					 const struct fwd_entry *entry)
{
	long err;

	if (entry->nat && p->l4 == ETH_HLEN + sizeof(struct ipv6hdr))
		return fwd_translate6(skb, p, entry);
	err = decrement_ttl(skb, p);
	if (!err && entry->nat)
		err = rewrite(skb, p, entry->nat == FWD_NAT_SRC ? SIDE_SRC : SIDE_DST,
			      &entry->nat_addr, entry->nat_port);
	if (!err && entry->action == FWD_CONTAINER)
		err = bpf_skb_store_bytes(skb, 0, entry->macs, sizeof(entry->macs), 0);
	return err;
}

/* Translates, forwards and addresses the frame of p as the entry says. */
static __always_inline long fwd_rewrite(struct __sk_buff *skb, struct packet *p,
					const struct fwd_entry *entry)
{
	if (entry->nat == FWD_NAT_BOTH &&
	    rewrite(skb, p, SIDE_SRC, &entry->src_addr, entry->src_port))
		return -EINVAL;
	return p->ipv6 ? fwd_rewrite6(skb, p, entry) : fwd_rewrite4(skb, p, entry);
}

/*
 * Sends the packet to the node by the tunnel. Over IPv4 without an outer checksum: the inner ones
 * suffice, and some network cards compute it wrongly. IPv6 requires one (RFC 8200, 8.1).
 */
static __noinline int node_redirect(struct __sk_buff *skb, const struct addr *remote)
{
	bool ipv6 = !addr_is_mapped(remote);
	struct cluster *cluster = cluster_get();
	__u64 flags = ipv6 ? BPF_F_TUNINFO_IPV6 : BPF_F_ZERO_CSUM_TX;
	struct bpf_tunnel_key key = {};
	long err;

	if (!cluster)
		return VERDICT_DROP;
	key.tunnel_id = cluster->vni;
	if (ipv6) {
		__builtin_memcpy(key.remote_ipv6, remote, sizeof(*remote));
		__builtin_memcpy(key.local_ipv6, &cluster->addr6, sizeof(*remote));
	} else {
		key.remote_ipv4 = bpf_ntohl(addr_ipv4(remote));
		key.local_ipv4 = bpf_ntohl(addr_ipv4(&cluster->addr4));
	}
	err = bpf_skb_set_tunnel_key(skb, &key, sizeof(key), flags);
	if (err == -EINVAL) /* before 6.0, the kernel accepts no source, and uses the route's */
		err = bpf_skb_set_tunnel_key(skb, &key, TUNNEL_KEY_SIZE, flags);
	if (err)
		return drop(skb, REASON_REWRITE);
	return bpf_redirect(cluster->tunnel, 0);
}

static __always_inline int fwd_redirect(struct __sk_buff *skb, const struct fwd_entry *entry)
{
	if (entry->action == FWD_CONTAINER)
		return bpf_redirect_peer(entry->ifindex, 0);
	skb->tc_index = TAG_TRANSLATED;
	if (entry->action == FWD_NODE)
		return node_redirect(skb, &entry->node.remote);
	return bpf_redirect_neigh(entry->ifindex, (void *)&entry->next_hop, sizeof(entry->next_hop),
				  0);
}

/*
 * Translates p, a remote's packet that goes through the stack, if the flow is still that of the entry.
 * Packets that end connections are decided in full.
 */
static __noinline int fwd_cache_receive(struct __sk_buff *skb, struct packet *p,
					struct fwd_entry *entry)
{
	struct flow_args *args = flow_scratch_get();

	if (!args || fwd_changes_state(p) ||
	    !fwd_track_received(args, p, entry, fwd_entry_owner(entry)))
		return NOT_HANDLED;
	if (rewrite(skb, p, SIDE_DST, &entry->nat_addr, entry->nat_port))
		return drop(skb, REASON_REWRITE);
	fwd_record_stack(entry->flow.id);
	skb->tc_index = entry->tag;
	packet_to_stack(p, &entry->nat_addr, entry->nat_port, entry->flow.id);
	return VERDICT_NEXT;
}

/* Forwards the packet in pkt_scratch by its entry. NOT_HANDLED: none applies (fwd_cache_take). */
__noinline int fwd_cache_forward(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry;

	if (!p)
		return NOT_HANDLED;
	if (p->tcp_syn || p->tcp_synack)
		tuple_hint_reopen(p);
	entry = fwd_cache_take(skb, p);
	if (!entry)
		return NOT_HANDLED;
	if (entry->action == FWD_STACK) {
		skb->tc_index = entry->tag;
		if (entry->flags & FWD_COMPARE)
			fwd_tag_pending(skb, p, PENDING_COMPARE, entry->ifindex);
		packet_to_stack(p, &p->dst, p->dport, p->id);
		return VERDICT_NEXT;
	}
	if (entry->action == FWD_FLOW)
		return fwd_cache_receive(skb, p, entry);
	if (fwd_rewrite(skb, p, entry))
		return drop(skb, REASON_REWRITE);
	return fwd_redirect(skb, entry);
}
