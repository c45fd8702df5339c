/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ingressPolicy: which other containers of this host may open connections to a
 * container. The host and the outside always may. It is enforced where a packet
 * enters the container, after all translation, so the ingress device identifies
 * the sender. Behind another plugin's bridge, only the source address is known.
 */
#pragma once

#include "endpoint.h"
#include "flow.h"

/*
 * Records that the container behind device has sent p, so that replies are admitted.
 * A connection must begin with its SYN or INIT: another packet may belong to a connection
 * that another container opened before the policy was set.
 */
static __noinline void policy_track_egress(const struct packet *p, const struct device *device)
{
	struct flow_args *args = flow_scratch_get();

	if (!args || p->icmp_error || p->decided.ct_update)
		return;
	flow_sent_key(&args->key, p, FLOW_EGRESS);
	args->new.owner = device->owner;
	if (!flow_track_sent() && packet_may_open(p)) {
		__builtin_memset(&args->new, 0, sizeof(args->new));
		args->new.owner = device->owner;
		flow_open(&args->new, p, FROM_CONTAINER, now_ticks());
		flow_insert(true);
	}
}

/*
 * Creates the flow with the key in args, if the container behind device has opened the connection
 * before it got its policy. Reports whether it has.
 */
static __always_inline bool policy_admit_older(struct flow_args *args, const struct device *device)
{
	const struct admitted_flow *older = bpf_map_lookup_elem(&admitted_flows, &args->key);

	if (!older || older->owner != device->owner)
		return false;
	__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.owner = device->owner;
	args->new.state = args->key.protocol == IPPROTO_UDP ? FLOW_UDP_STREAM : FLOW_ESTABLISHED;
	args->new.flags = FLOW_REPLIED;
	args->new.last_seen = older->last_seen;
	args->new.created = older->last_seen;
	if (flow_expired(&args->new))
		return false;
	args->new.last_seen = now_ticks();
	if (flow_insert(true))
		bpf_map_delete_elem(&admitted_flows, &args->key);
	return true;
}

/* Tracks p as a reply to the container behind device. Reports whether it is one. */
static __noinline bool policy_track_reply(const struct packet *p, const struct device *device)
{
	struct flow_args *args = flow_scratch_get();
	struct flow *flow;

	if (!args || packet_opens(p) || (p->icmp_error && !addr_equal(&p->outer_src, &p->src)))
		return false;
	flow_received_key(&args->key, p, FLOW_EGRESS);
	flow = flow_lookup(args);
	if (!flow || flow->owner != device->owner || flow_expired(flow))
		return policy_admit_older(args, device);
	flow_track(FROM_REMOTE);
	return true;
}

static __always_inline bool policy_allows_container(const struct device *device, __u64 container,
						    __u32 network)
{
	if (container == device->container)
		return true;
	return device->ingress_policy == POLICY_SAME_NETWORK && network == device->network;
}

/*
 * Reports whether the sender is admitted, or not a container. An unparsed p has a source of
 * zeros.
 */
static __always_inline bool policy_allows_sender(struct __sk_buff *skb, const struct packet *p,
						 const struct device *device)
{
	struct device *sender = device_lookup(skb->ingress_ifindex);
	struct endpoint *endpoint;

	if (sender)
		return policy_allows_container(device, sender->container, sender->network);
	endpoint = endpoint_lookup(p->icmp_error ? &p->outer_src : &p->src);
	return !endpoint || policy_allows_container(device, endpoint->container, endpoint->network);
}

/*
 * Reports whether p is ARP or neighbor discovery, which containers on one bridge need for
 * replies. A router decrements the hop limit of 255 (RFC 4861, 7.1).
 */
static __always_inline bool policy_is_neighbor(struct __sk_buff *skb, const struct packet *p)
{
	__u8 *type;

	if (has_vlan(skb))
		return false;
	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return true;
	if (!p->ipv6 || p->ttl != 255 || p->protocol != IPPROTO_ICMPV6 || p->frag_id ||
	    p->frag_offset)
		return false;
	type = bytes_at(skb, p->l4, sizeof(*type));
	return type && (*type == ICMP6_NEIGHBOR_SOLICIT || *type == ICMP6_NEIGHBOR_ADVERT);
}

/* Reports whether the container behind device may receive p even if it is not a reply. */
static __always_inline bool policy_allows(struct __sk_buff *skb, const struct packet *p,
					  const struct device *device)
{
	return device->ingress_policy == POLICY_OPEN || policy_allows_sender(skb, p, device) ||
	       policy_is_neighbor(skb, p);
}
