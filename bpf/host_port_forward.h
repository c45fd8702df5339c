/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Host ports for clients outside this host. For clients on it, see hairpin.h. */
#pragma once

#include "forward.h"
#include "host_port.h"
#include "socket.h"

/*
 * Forwards a packet for a host port to its container. Whatever the entry says,
 * the destination must be an address of this host, since traffic that passes
 * through is not ours (CVE-2025-67499). Loopback must not arrive on a wire
 * (CVE-2020-8558).
 */
static __always_inline int host_port_forward(struct __sk_buff *skb, const struct packet *p)
{
	struct host_port *port = host_port_lookup(p);
	struct flow_key key;
	struct flow *flow;

	if (!port || addr_is_loopback(&p->dst, p->ipv6))
		return VERDICT_NEXT;
	flow_dnat_key(&key, p, &port->target_addr, port->target_port);
	flow = flow_dnat_lookup(&key, p, port->owner);
	/* A known flow has passed these checks with its first packet. */
	if (!flow && (p->icmp_error || !fib_is_local(skb, p) || is_host_connection(skb, p)))
		return VERDICT_NEXT;
	if (!host_port_allows(p, port))
		return drop_for(skb, port->owner, REASON_SRC_RANGE);
	if (flow)
		flow_touch(&key, flow, p, false);
	else if (flow_dnat_replace(&key, p, port->owner))
		return drop_for(skb, port->owner, REASON_REWRITE);
	return forward_dnat(skb, p, endpoint_lookup(&port->target_addr), &port->target_addr,
			    port->target_port);
}

/*
 * Sends p, a reply of a host port whose entry was lost, with the host port as its
 * source, and restores the entry. A host port on any address replies from the
 * one that the host would choose.
 */
static __noinline int host_port_reply(struct __sk_buff *skb, const struct packet *p,
				      const struct host_port *port)
{
	struct flow *flow = flow_recover_reply(p);
	struct addr source = port->target_addr;

	if (flow && flow->owner == port->owner)
		return forward_snat(skb, p, &flow->nat_addr, flow->nat_port);
	if (addr_is_any(&source, p->ipv6) && !fib_source(skb, p, &source))
		return drop_for(skb, port->owner, REASON_NO_SOURCE);
	if (!p->icmp_error && flow_store_reply(p, &source, port->target_port, port->owner))
		return drop_for(skb, port->owner, REASON_REWRITE);
	return forward_snat(skb, p, &source, port->target_port);
}
