/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The other nodes of a cluster. The agent that creates the host's routes to their containers writes the
 * same to the map nodes. VXLAN authenticates nothing but its sender's address, so a packet is accepted only from the
 * node that has its source. Containers must not be able to send from the host's address.
 */
#pragma once

#include <linux/if_packet.h>

#include "addr.h"
#include "maps.h"
#include "packet.h"
#include "tag.h"

/* Without members that kernels before 6.0 do not know. */
#define TUNNEL_KEY_SIZE offsetof(struct bpf_tunnel_key, local_ipv4)

static __always_inline struct cluster *cluster_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&cluster, &zero);
}

/* Returns the node whose containers have the address, or NULL. */
static __noinline struct node *node_lookup(const struct addr *addr)
{
	return prefix_lookup(&nodes, 0, addr);
}

/* Reports whether nodes has entries. */
static __always_inline bool node_any(void)
{
	struct cluster *cluster = cluster_get();

	return cluster && cluster->nodes;
}

/* Reports whether the device is the cluster's tunnel. */
static __always_inline bool node_is_tunnel(__u32 ifindex)
{
	struct cluster *cluster = cluster_get();

	return cluster && cluster->tunnel == ifindex;
}

/* Reports whether p is UDP to the port of the cluster's VXLAN. */
static __noinline bool node_is_tunnel_port(const struct packet *p)
{
	struct cluster *cluster = p->protocol == IPPROTO_UDP ? cluster_get() : NULL;

	return cluster && cluster->port && cluster->port == p->dport;
}

/* Reports whether the node has sent the packet that the tunnel received, in the cluster's VNI. */
static __noinline bool node_is_sender(struct __sk_buff *skb, const struct node *node, __u32 vni)
{
	bool ipv6 = !addr_is_mapped(&node->remote);
	struct bpf_tunnel_key key = {};

	if (bpf_skb_get_tunnel_key(skb, &key, TUNNEL_KEY_SIZE, ipv6 ? BPF_F_TUNINFO_IPV6 : 0) ||
	    key.tunnel_id != vni)
		return false;
	if (ipv6)
		return addr_equal((const struct addr *)key.remote_ipv6, &node->remote);
	return bpf_htonl(key.remote_ipv4) == addr_ipv4(&node->remote);
}

static __always_inline bool addr_is_in(const struct addr *a, const struct prefix *prefix)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)&prefix->addr,
		    *mask = (const __u32 *)&prefix->mask;

	for (int i = 0; i < 4; i++)
		if ((x[i] ^ y[i]) & mask[i])
			return false;
	return true;
}

/*
 * Reports whether to accept the packet in pkt_scratch from the tunnel: its outer source must be the
 * node that has its source, and its destination a container of this node. Such a packet is marked
 * as addressed to this host, because each tunnel device has its own MAC address. Packets that the
 * programs receive again were accepted before.
 */
__noinline int node_admits(struct __sk_buff *skb, __u32 parsed, __u32 tag)
{
	struct packet *p = pkt_scratch_get();
	struct cluster *cluster = cluster_get();
	struct bpf_tunnel_key key;
	struct node *node;

	if (!p || !cluster)
		return false;
	/* Sent again by the programs, and not from a tunnel. */
	if (tag == TAG_ADMITTED || tag == TAG_CT_UPDATE)
		return bpf_skb_get_tunnel_key(skb, &key, TUNNEL_KEY_SIZE, 0) == -EINVAL;
	if (parsed == PARSED_NOT_IP || parsed == PARSED_TRUNCATED ||
	    !addr_is_in(&p->dst, p->ipv6 ? &cluster->containers6 : &cluster->containers4))
		return false;
	node = node_lookup(p->icmp_error ? &p->outer_src : &p->src);
	if (!node || !node_is_sender(skb, node, cluster->vni))
		return false;
	return skb->pkt_type == PACKET_HOST || !bpf_skb_change_type(skb, PACKET_HOST);
}

/* Where a packet to a container's own address comes from. */
enum origin {
	ORIGIN_OUTSIDE,
	ORIGIN_NODE,   /* a container of another node */
	ORIGIN_FORGED, /* under the address of such a container, but not by its node's tunnel */
};

/* Returns where a packet from src that the device has received comes from. */
static __noinline enum origin node_origin(const struct addr *src, __u32 ifindex)
{
	struct cluster *cluster = cluster_get();
	struct node *node;

	if (!cluster || !cluster->nodes)
		return ORIGIN_OUTSIDE;
	if (cluster->tunnel == ifindex)
		return ORIGIN_NODE;
	node = node_lookup(src);
	if (!node)
		return ORIGIN_OUTSIDE;
	return node->mode == NODE_TUNNEL ? ORIGIN_FORGED : ORIGIN_NODE;
}

/* Returns the node that has addr, if packets to it may bypass the stack by the tunnel; or NULL. */
static __always_inline struct node *node_by_tunnel(const struct cluster *cluster,
						   const struct addr *addr)
{
	struct node *node = cluster && cluster->nodes ? node_lookup(addr) : NULL;

	return node && node->mode != NODE_DIRECT ? node : NULL;
}

/* Reports whether packets to addr may bypass the stack by the device, which is the tunnel. */
static __always_inline bool node_reaches(const struct addr *addr, __u32 ifindex)
{
	struct cluster *cluster = cluster_get();

	return node_by_tunnel(cluster, addr) && cluster->tunnel == ifindex;
}

/*
 * Sets next to the next hop of p, whose route has a tunnel; or returns an error of
 * bpf_fib_lookup.
 */
static __always_inline long node_next_hop(const struct packet *p, __u32 len, struct next_hop *next)
{
	struct cluster *cluster = cluster_get();
	struct node *node = node_by_tunnel(cluster, &p->dst);

	if (!node)
		return BPF_FIB_LKUP_RET_UNSUPP_LWT;
	if (len > node->mtu)
		return BPF_FIB_LKUP_RET_FRAG_NEEDED;
	next->tunnel = true;
	next->max_len = node->mtu;
	next->ifindex = cluster->tunnel;
	next->neigh.nh_family = p->ipv6 ? AF_INET6 : AF_INET;
	__builtin_memcpy(next->neigh.ipv6_nh, &node->remote, sizeof(node->remote));
	return BPF_FIB_LKUP_RET_SUCCESS;
}
