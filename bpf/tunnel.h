/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Tunnels of the host: a decapsulated packet seems to come from the tunnel's device,
 * whatever its addresses are. With antiSpoof a container cannot use them. Its tunnels to
 * others are forwarded. Those with a secret (ESP, WireGuard) authenticate their senders.
 * Other nodes of a cluster trust the host's address, so nobody else sends VXLAN under it.
 */
#pragma once

#include "endpoint.h"
#include "fib.h"
#include "fragment.h"
#include "socket.h"
#include "verdict.h"

/* Reports whether the protocol is a tunnel without authentication: IPIP, 6in4, GRE, L2TP, MPLS. */
static __always_inline bool is_open_tunnel(__u8 protocol)
{
	switch (protocol) {
	case IPPROTO_IPIP:
	case IPPROTO_IPV6:
	case IPPROTO_GRE:
	case IPPROTO_L2TP:
	case IPPROTO_MPLS:
		return true;
	default:
		return false;
	}
}

#define IPPROTO_OSPF 89
#define IPPROTO_VRRP 112

/*
 * Reports whether the protocol is a tunnel's or a router's, so that the host may receive packets
 * that it has not asked for.
 */
static __always_inline bool is_tunnel(__u8 protocol)
{
	switch (protocol) {
	case IPPROTO_RSVP:
	case IPPROTO_ESP:
	case IPPROTO_AH:
	case IPPROTO_OSPF:
	case IPPROTO_PIM:
	case IPPROTO_VRRP:
		return true;
	default:
		return is_open_tunnel(protocol);
	}
}

/* Reports whether the port is a default port of VXLAN (RFC 7348, Linux, GPE) or Geneve. */
static __always_inline bool is_tunnel_port(__be16 port)
{
	return port == bpf_htons(4789) || port == bpf_htons(8472) || port == bpf_htons(4790) ||
	       port == bpf_htons(6081);
}

/* Checks that the host would forward or refuse a packet of an open tunnel to receiver. */
static __noinline int tunnel_check(struct __sk_buff *skb, const struct addr *receiver, bool ipv6)
{
	struct bpf_fib_lookup fib;

	/* The host receives broadcasts and groups itself, which the routing table does not show. */
	if (addr_is_link_scoped(receiver, ipv6))
		return REASON_TUNNEL;
	fib_init(&fib, receiver, ipv6, skb->ifindex);
	return fib_has_route(bpf_fib_lookup(skb, &fib, sizeof(fib), 0)) ? REASON_NONE
									: REASON_TUNNEL;
}

/* Checks UDP to a tunnel's port. Without a socket of the host there, it may be for a host port. */
static __always_inline int tunnel_check_udp(struct __sk_buff *skb, struct flow_key *key,
					    const struct udphdr *udp, bool ipv6)
{
	key->protocol = IPPROTO_UDP;
	key->remote_port = bpf_ntohs(udp->source);
	key->local_port = bpf_ntohs(udp->dest);
	if (socket_lookup(skb, key, ipv6) == SOCKET_NONE)
		return REASON_NONE;
	return tunnel_check(skb, &key->local, ipv6);
}

/*
 * Reports whether p may be UDP to the port of the cluster's VXLAN: it is, or IPv6 headers hide what
 * it is.
 */
static __always_inline bool tunnel_may_be_nodes(const struct packet *p, int parsed)
{
	struct cluster *cluster = cluster_get();

	if (parsed == PARSED)
		return node_is_tunnel_port(p);
	return parsed == PARSED_PROTOCOL && p->ipv6 && p->protocol != IPPROTO_ICMPV6 &&
	       !p->icmp_error && cluster && cluster->port;
}

/*
 * Reports whether p, not from a container's address, is forwarded VXLAN under the host's address:
 * the stack has translated its source. The tunnel's own packets are not checked: see to_uplink.
 */
static __noinline bool tunnel_is_forged(struct __sk_buff *skb, const struct packet *p, int parsed)
{
	return packet_ingress(skb, p) && tunnel_may_be_nodes(p, parsed) &&
	       (device_lookup(skb->ingress_ifindex) || fib_is_local_addr(skb, &p->src, p->ipv6));
}
