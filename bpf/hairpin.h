/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Host ports for clients on this host: the host itself, other containers, and the container itself, which sees the
 * gateway as the client. Neither direction goes through the stack, which would reject such addresses as martian.
 */
#pragma once

#include "endpoint.h"
#include "forward.h"
#include "host_port.h"
#include "masq.h"
#include "rewrite.h"
#include "socket.h"
#include "verdict.h"

#define LOOPBACK_IFINDEX 1

/*
 * Updates or creates the flow from the gateway's port to the container, which gives replies
 * p's destination as source. Returns false if it cannot.
 */
static __noinline bool hairpin_track_dnat(const struct packet *p, const struct endpoint *endpoint,
					  const struct host_port *port,
					  const struct masq_args *masq)
{
	struct flow_args *args = flow_scratch_get();
	struct flow *flow;
	__u32 first;
	bool inserted;

	if (!args)
		return false;
	first = args->id; /* of the masqueraded flow, which must stay */
	__builtin_memset(&args->key, 0, sizeof(args->key));
	args->key.remote = endpoint->gateway;
	args->key.local = port->target_addr;
	args->key.remote_port = masq->key.local_port;
	args->key.local_port = port->target_port;
	args->key.protocol = p->protocol;
	args->key.kind = FLOW_DNAT;
	flow = flow_lookup(args);
	if (flow && flow->owner == port->owner && flow->nat_port == p->dport &&
	    addr_equal(&flow->nat_addr, &p->dst)) {
		flow_track(FROM_REMOTE);
		return true;
	}
	__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.owner = port->owner;
	args->new.nat_addr = p->dst;
	args->new.nat_port = p->dport;
	args->new.remote_port = masq->key.local_port;
	args->new.payer = masq->flow.payer;
	flow_open(&args->new, p, FROM_REMOTE, now_ticks());
	args->keep = first;
	inserted = flow_insert();
	args->keep = 0;
	return inserted;
}

/* Returns a hash of the host address and port that p is addressed to. */
static __always_inline __u16 hairpin_via(const struct packet *p)
{
	const __u32 *dst = (const __u32 *)&p->dst;
	__u32 hash = hash_mix(p->dport, dst[3]);

	if (p->ipv6)
		hash = hash_mix(hash_mix(hash_mix(hash, dst[0]), dst[1]), dst[2]);
	return hash >> 16;
}

/*
 * Sends p to the host port's container, from the gateway. A client on this host is
 * trusted, because nobody else can have sent p.
 */
static __noinline int hairpin_to_endpoint(struct __sk_buff *skb, struct packet *p,
					  const struct host_port *port)
{
	struct endpoint *endpoint = endpoint_lookup(&port->target_addr);
	struct masq_args *args = masq_scratch_get();
	struct device *client;
	__u16 gateway_port;

	if (!endpoint || !args)
		return VERDICT_NEXT;
	/* The veth would drop it. The host refuses it: nothing listens there. */
	if (packet_segment_len(skb, p) > endpoint->mtu)
		return VERDICT_NEXT;
	/* First flow: the client to the container, masqueraded. */
	args->tuple = *packet_tuple(p);
	args->tuple.dst = port->target_addr;
	args->tuple.dport = port->target_port;
	masq_init(args, &args->tuple, &endpoint->gateway, port->owner, hairpin_via(p));
	client = device_lookup(skb->ifindex);
	args->flow.payer = client ? client->owner : port->owner;
	if (!masq_find()) {
		if (p->tcp_synack || is_host_connection(skb, p))
			return VERDICT_NEXT;
		if (p->icmp_error)
			return drop_for(skb, port->owner, REASON_NO_FLOW);
		if (!masq_alloc_port(skb))
			return drop_for(skb, port->owner, REASON_NO_PORT);
	}
	/* Second flow: the gateway to the host port. */
	p->decided.end_expected = true;
	gateway_port = args->key.local_port;
	if (!hairpin_track_dnat(p, endpoint, port, args))
		return drop_for(skb, port->owner, REASON_NO_PORT);

	if (rewrite(skb, p, SIDE_DST, &port->target_addr, port->target_port) ||
	    rewrite(skb, p, SIDE_SRC, &endpoint->gateway, gateway_port))
		return drop_for(skb, port->owner, REASON_REWRITE);
	skb->tc_index = TAG_TRANSLATED;
	return bpf_redirect_neigh(endpoint->ifindex, NULL, 0, 0);
}

/* Sends p, a container's reply to the gateway, to the client of the masqueraded flow. */
static __noinline int hairpin_reply(struct __sk_buff *skb, struct packet *p,
				    const struct flow *masq)
{
	struct addr client = masq->nat_addr, host_addr;
	__u16 client_port = masq->nat_port;
	__u64 owner = masq->owner;
	struct flow *dnat = flow_track_sent(p, owner, false);
	struct endpoint *endpoint;

	if (!dnat)
		return drop_for(skb, owner, REASON_NO_FLOW);
	host_addr = dnat->nat_addr;
	if (rewrite(skb, p, SIDE_SRC, &host_addr, dnat->nat_port) ||
	    rewrite(skb, p, SIDE_DST, &client, client_port))
		return drop_for(skb, owner, REASON_REWRITE);
	endpoint = endpoint_lookup(&client);
	/*
	 * The frame may be addressed to the bridge above this device, and loopback keeps the
	 * type.
	 */
	if (skb->pkt_type == PACKET_OTHERHOST && bpf_skb_change_type(skb, PACKET_HOST))
		return drop_for(skb, owner, REASON_REWRITE);
	skb->tc_index = TAG_TRANSLATED | tag_judged(p);
	return bpf_redirect_neigh(endpoint ? endpoint->ifindex : LOOPBACK_IFINDEX, NULL, 0, 0);
}

/*
 * Reports whether p, from sender behind device, is a reply of the flow, or an ICMP error of the
 * container itself. Errors about the MTU are not: no path on this host has a smaller one.
 */
static __always_inline bool hairpin_is_reply(const struct packet *p, const struct flow *flow,
					     const struct device *device,
					     const struct endpoint *sender)
{
	if (!sender || flow->owner != sender->owner)
		return false;
	return !p->icmp_error ||
	       (!p->icmp_too_big && device && device->container == sender->container &&
		addr_equal(&p->outer_src, &p->src));
}

/* Leaves p, a container's reply to the host's own connection, to the stack. */
static __noinline int hairpin_to_host(struct __sk_buff *skb, struct packet *p, struct flow *flow)
{
	flow_track_received(skb, p);
	if (rewrite(skb, p, SIDE_DST, &flow->nat_addr, flow->nat_port))
		return drop(skb, REASON_REWRITE);
	return VERDICT_NEXT;
}

/*
 * Handles p, which the container behind device sends to this host: a reply to a hairpin
 * client or to the host, or a packet to a host port. sender is the endpoint with p's source,
 * or NULL.
 */
static __always_inline int hairpin_from_container(struct __sk_buff *skb, struct packet *p,
						  const struct device *device,
						  const struct endpoint *sender)
{
	struct flow *flow = packet_opens(p) ? NULL : masq_lookup_reply(skb, p, FLOW_READ);
	struct host_port *port;

	if (flow && flow->owner == OWNER_HOST)
		return hairpin_to_host(skb, p, flow);
	if (flow && hairpin_is_reply(p, flow, device, sender)) {
		flow_track_received(skb, p);
		return hairpin_reply(skb, p, flow);
	}
	port = host_port_lookup(p);
	if (!port || addr_is_loopback(&p->dst, p->ipv6) || !route_ask(skb, ROUTE_LOCAL))
		return VERDICT_NEXT;
	/* For source ranges, the source must be an address of the container. */
	if (port->src_range_set && (!device || !sender || sender->container != device->container ||
				    !host_port_allows(p, port)))
		return drop_for(skb, port->owner, REASON_SRC_RANGE);
	if (p->decided.pending) {
		packet_translate(p, &port->target_addr, port->target_port);
		policy_track_host_port();
	}
	return hairpin_to_endpoint(skb, p, port);
}
