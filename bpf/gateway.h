/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Routes of a container with a gateway of their own: another container, or a
 * neighbor of the host on an uplink. Packets bypass the stack in both directions, because
 * replies without a request are invalid to conntrack.
 */
#pragma once

#include "addr.h"
#include "endpoint.h"
#include "fib.h"
#include "tag.h"
#include "verdict.h"

/* Returns the gateway of the set's route to addr; NULL: the host. */
static __noinline const struct addr *gateway_lookup(__u32 set, const struct addr *addr, bool ipv6)
{
	const struct addr *gateway = prefix_lookup(&prefixes, set, addr);

	/* An IPv6 route to everything contains the mapped IPv4 addresses. */
	if (!gateway || addr_is_any(gateway, true) || addr_is_mapped(gateway) == ipv6)
		return NULL;
	return gateway;
}

/*
 * Reports whether a router may forward p with its source. For packets that passed anti-spoofing,
 * only link-local addresses are checked.
 */
static __always_inline bool gateway_may_forward(struct __sk_buff *skb, const struct packet *p,
						bool anti_spoof)
{
	const struct addr *src = p->icmp_error ? &p->outer_src : &p->src;

	if (skb->pkt_type != PACKET_HOST || addr_is_link_scoped(src, p->ipv6))
		return false;
	return anti_spoof || (!addr_is_any(src, p->ipv6) && !addr_is_loopback(src, p->ipv6) &&
			      !fib_is_local_addr(skb, src, p->ipv6));
}

/* Sends p to the container. Its to_container admits p, and its queue limits the rate. */
static __noinline int gateway_to_endpoint(struct __sk_buff *skb, const struct packet *p,
					  const struct endpoint *to)
{
	/* mac and host_mac: destination and source, as in a frame. */
	if (bpf_skb_store_bytes(skb, 0, to->mac, 2 * ETH_ALEN, 0))
		return drop(skb, REASON_REWRITE);
	skb->tc_index = TAG_TRANSLATED | tag_judged(p);
	return bpf_redirect(to->ifindex, 0);
}

/* Sends p, from the container behind device, to its route's gateway. VERDICT_NEXT: the host. */
static __noinline int gateway_forward(struct __sk_buff *skb, const struct packet *p,
				      const struct device *device)
{
	bool anti_spoof = device->flags & DEVICE_ANTI_SPOOF;
	struct bpf_redir_neigh neigh = {.nh_family = p->ipv6 ? AF_INET6 : AF_INET};
	const struct addr *gateway;
	struct endpoint *to;
	__u32 uplink;

	if (addr_is_link_scoped(&p->dst, p->ipv6))
		return VERDICT_NEXT;
	gateway = gateway_lookup(device->route_set, &p->dst, p->ipv6);
	if (!gateway || !gateway_may_forward(skb, p, anti_spoof))
		return VERDICT_NEXT;
	to = endpoint_lookup(gateway);
	if (to)
		return gateway_to_endpoint(skb, p, to);
	uplink = fib_neighbor(skb, gateway, p->ipv6);
	if (!uplink || !is_uplink(uplink))
		return drop_for(skb, device->owner, REASON_NEXT_HOP);
	if (p->ipv6)
		__builtin_memcpy(neigh.ipv6_nh, gateway, sizeof(*gateway));
	else
		neigh.ipv4_nh = addr_ipv4(gateway);
	if (p->decided.admitted)
		skb->tc_index = (tag_of(p->id) ^ 1) | TAG_JUDGED; /* matches no tuple */
	return bpf_redirect_neigh(uplink, &neigh, sizeof(neigh), 0);
}

/*
 * Sends p to the container if the gateway of the container's route to p's sender has
 * sent it. VERDICT_NEXT: it has not.
 */
static __noinline int gateway_deliver(struct __sk_buff *skb, const struct packet *p,
				      const struct endpoint *to)
{
	const struct addr *gateway;
	struct endpoint *by;

	if (!to->route_set || !p->l3 || packet_segment_len(skb, p) > to->mtu)
		return VERDICT_NEXT;
	gateway = gateway_lookup(to->route_set, &p->src, p->ipv6);
	if (!gateway || endpoint_lookup(&p->src))
		return VERDICT_NEXT;
	by = endpoint_lookup(gateway);
	if ((by ? by->ifindex : fib_neighbor(skb, gateway, p->ipv6)) != skb->ifindex ||
	    !gateway_may_forward(skb, p, false))
		return VERDICT_NEXT;
	return gateway_to_endpoint(skb, p, to);
}

/* Like gateway_forward and gateway_deliver, for a container's p with unknown ports. */
static __noinline int gateway_unparsed(struct __sk_buff *skb, const struct packet *p,
				       const struct device *device, int parsed)
{
	int verdict = VERDICT_NEXT;
	struct endpoint *to;

	if (parsed == PARSED_NOT_IP || parsed == PARSED_TRUNCATED)
		return VERDICT_NEXT;
	if (device->route_set)
		verdict = gateway_forward(skb, p, device);
	if (verdict != VERDICT_NEXT || device->flags & DEVICE_ANTI_SPOOF)
		return verdict;
	to = endpoint_lookup(&p->dst);
	return to ? gateway_deliver(skb, p, to) : VERDICT_NEXT;
}
