/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Host ports for clients outside this host. For clients on it, see hairpin.h. */
#pragma once

#include "forward.h"
#include "host_port.h"
#include "socket.h"

/*
 * Reports whether p may open or continue a connection to a host port. Its destination must be
 * an address of this host, whatever the entry says: forwarded traffic is not ours
 * (CVE-2025-67499). SYN+ACKs are for the host's own connections.
 */
static __always_inline bool host_port_may_open(struct __sk_buff *skb, const struct packet *p)
{
	return !p->icmp_error && !p->tcp_synack && route_ask(skb, ROUTE_LOCAL) &&
	       !is_host_connection(skb, p);
}

/*
 * Forwards a packet for the number of a host port to the container, or as a reply to the flow
 * that has that number. Loopback must not arrive on a wire (CVE-2020-8558).
 */
static __noinline int host_port_forward(struct __sk_buff *skb, struct packet *p)
{
	struct host_port *port = host_port_lookup(p);
	struct flow_args *args = flow_scratch_get();
	struct endpoint *to;
	struct flow *flow;
	struct dnat *d;
	int verdict;

	if (!args)
		return VERDICT_NEXT;
	d = &args->dnat;
	if (!port || addr_is_loopback(&p->dst, p->ipv6))
		return forward_masq_reply(skb, p);
	dnat_init(d, packet_tuple(p), &port->target_addr, port->target_port);
	dnat_receive(!port->src_range_set);
	flow = dnat_find(packet_tuple(p), d, port->owner, packet_opens(p));
	if (!flow || !flow_is_live(flow)) {
		verdict = forward_masq_reply(skb, p);
		if (verdict != NOT_HANDLED)
			return verdict;
		flow = flow ? dnat_lookup(d) : NULL; /* the copy is gone */
	}
	/* A known flow has passed these checks with its first packet. */
	if (!flow && !host_port_may_open(skb, p))
		return VERDICT_NEXT;
	if (!host_port_allows(p, port))
		return drop_for(skb, port->owner, REASON_SRC_RANGE);
	to = endpoint_lookup(&port->target_addr);
	if (flow)
		flow_track_received(skb, p);
	else if (dnat_create(p, packet_tuple(p), d, port->owner))
		return drop_for(skb, port->owner, REASON_NO_PORT);
	return forward_flow(skb, p, to, d);
}
