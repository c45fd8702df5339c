/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ingressPolicy: which other containers of this host may send to a container.
 * The host and the outside always may, and so may whoever answers. It is asked
 * on the way into the container, behind every translation; who sends is told by
 * the device that a packet came in by, whatever its source has become since. From
 * behind a bridge, which hides that device, it is told by the source alone.
 */
#pragma once

#include "flow.h"
#include "host_port.h"
#include "verdict.h"

/* Remembers that the container behind device has sent p, so that it may be answered. */
static __noinline void policy_track_egress(const struct packet *p, const struct device *device)
{
	struct flow flow = {.owner = device->owner, .last_seen = now_ticks()};
	struct flow_key key;
	struct flow *known;

	if (p->icmp_error)
		return;
	flow_reply_key(&key, p);
	key.kind = FLOW_EGRESS;
	known = bpf_map_lookup_elem(&flows, &key);
	if (known && known->owner == device->owner)
		flow_touch(&key, known, p, false);
	else
		bpf_map_update_elem(&flows, &key, &flow, BPF_ANY);
}

/* p answers what the container behind device has sent. */
static __noinline bool policy_is_reply(const struct packet *p, const struct device *device)
{
	struct flow_key key;
	struct flow *flow;

	flow_dnat_key(&key, p, &p->dst, p->dport);
	key.kind = FLOW_EGRESS;
	flow = bpf_map_lookup_elem(&flows, &key) ?: flow_recover(&key);
	if (!flow || flow->owner != device->owner || flow_expired(flow, p->protocol))
		return false;
	flow_touch(&key, flow, p, true);
	return true;
}

/* A container may send to the one behind device. */
static __always_inline bool policy_allows(const struct device *device, __u32 container,
					  __u32 network)
{
	if (container == device->container)
		return true;
	return device->ingress_policy == POLICY_SAME_NETWORK && network == device->network;
}

/* The same of who has sent skb, as p if that could be parsed: true where that is no container. */
static __always_inline bool policy_allows_sender(struct __sk_buff *skb, const struct packet *p,
						 const struct device *device)
{
	__u32 ifindex = skb->ingress_ifindex;
	struct device *sender = bpf_map_lookup_elem(&devices, &ifindex);
	struct endpoint *endpoint;

	if (sender)
		return policy_allows(device, sender->container, sender->network);
	endpoint = bpf_map_lookup_elem(&endpoints, p->icmp_error ? &p->outer_src : &p->src);
	return !endpoint || policy_allows(device, endpoint->container, endpoint->network);
}

/* Containers behind one bridge have to find each other before one can answer the other. */
static __always_inline bool policy_is_neighbor(struct __sk_buff *skb, const struct packet *p)
{
	__u8 *type;

	if (has_vlan(skb))
		return false;
	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return true;
	if (!p->ipv6 || p->protocol != IPPROTO_ICMPV6 || p->frag_id || p->frag_offset)
		return false;
	type = bytes_at(skb, p->l4, sizeof(*type));
	return type && (*type == ICMP6_NEIGHBOR_SOLICIT || *type == ICMP6_NEIGHBOR_ADVERT);
}

/* Says whether skb must not reach the container behind device; then it is counted. */
static __always_inline bool policy_drops(struct __sk_buff *skb, const struct device *device)
{
	struct packet *p;
	int parsed;

	if (device->ingress_policy == POLICY_OPEN || !skb->ingress_ifindex) /* the host's own */
		return false;
	p = pkt_scratch_get();
	if (!p)
		return false;
	parsed = parse(skb, p, ETH_HLEN);
	if (policy_allows_sender(skb, p, device) || policy_is_neighbor(skb, p) ||
	    (parsed == PARSED && policy_is_reply(p, device)))
		return false;
	drop_for(skb, device->owner, REASON_POLICY);
	return true;
}

/* The sender is the container behind device, as who has to be in a port's sources. */
static __always_inline bool host_port_knows_sender(const struct device *device,
						   const struct endpoint *sender,
						   const struct host_port *port)
{
	return !port->src_range_set || (device && sender && sender->container == device->container);
}

/* The host port is for the client that p is from. */
static __noinline bool host_port_allows(const struct packet *p, const struct host_port *port)
{
	struct prefix_key key = {
		.prefixlen = 32 + 128,
		.set = port->src_range_set,
		.addr = p->src,
	};

	return !port->src_range_set || bpf_map_lookup_elem(&port_src_ranges, &key);
}
