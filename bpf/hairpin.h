/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Host ports for clients on this host: the host itself (127.0.0.1, ::1, its own
 * addresses), other containers, and the container itself. A container could not
 * reply to the first, and would reply to the others directly. So it sees the
 * gateway as the client, with two entries in flows: that of a masqueraded flow
 * from the client to the container, and that of a host port. Neither direction
 * goes through the stack, which would reject such addresses as martian.
 */
#pragma once

#include "endpoint.h"
#include "fib.h"
#include "host_port.h"
#include "masq.h"
#include "rewrite.h"
#include "socket.h"
#include "verdict.h"

#define LOOPBACK_IFINDEX 1

/* Sends p to the host port's container, from the gateway. */
static __noinline int hairpin_to_endpoint(struct __sk_buff *skb, const struct packet *p,
					  const struct host_port *port)
{
	struct endpoint *endpoint = endpoint_lookup(&port->target_addr);
	struct packet translated = *p;
	struct flow_key key;
	struct flow *flow;

	if (!endpoint)
		return VERDICT_NEXT;
	/* First flow: the client to the container, masqueraded. */
	translated.dst = port->target_addr;
	translated.dport = port->target_port;
	masq_key(&key, &translated, &endpoint->gateway);
	if (!masq_track(&translated, &key, port->owner) &&
	    !masq_recover(&translated, &key, port->owner)) {
		if (is_host_connection(skb, p))
			return VERDICT_NEXT;
		if (p->icmp_error)
			return drop_for(skb, port->owner, REASON_NO_FLOW);
		if (!masq_alloc_port(skb, &translated, &key, port->owner))
			return drop_for(skb, port->owner, REASON_NO_PORT);
	}

	/* Second flow: the gateway to the host port. */
	translated.src = endpoint->gateway;
	translated.sport = key.local_port;
	translated.dst = p->dst;
	translated.dport = p->dport;
	flow_dnat_key(&key, &translated, &port->target_addr, port->target_port);
	flow = flow_dnat_lookup(&key, &translated, port->owner);
	if (flow)
		flow_touch(&key, flow, &translated, false);
	else if (flow_dnat_store(&key, &translated, port->owner))
		return drop_for(skb, port->owner, REASON_REWRITE);

	if (rewrite(skb, p, SIDE_DST, &port->target_addr, port->target_port) ||
	    rewrite(skb, p, SIDE_SRC, &translated.src, translated.sport))
		return drop_for(skb, port->owner, REASON_REWRITE);
	return bpf_redirect_neigh(endpoint->ifindex, NULL, 0, 0);
}

/* Sends p, a container's reply to the gateway, to the client of the masqueraded flow. */
static __noinline int hairpin_reply(struct __sk_buff *skb, const struct packet *p,
				    const struct flow *masq)
{
	struct flow *dnat = flow_track_reply(p) ?: flow_recover_reply(p);
	struct addr client = masq->nat_addr, host_addr;
	__u16 client_port = masq->nat_port;
	__u64 owner = masq->owner;
	__u32 ifindex = LOOPBACK_IFINDEX;
	struct endpoint *endpoint;

	if (!dnat)
		return drop_for(skb, owner, REASON_NO_FLOW);
	host_addr = dnat->nat_addr;
	if (rewrite(skb, p, SIDE_SRC, &host_addr, dnat->nat_port) ||
	    rewrite(skb, p, SIDE_DST, &client, client_port))
		return drop_for(skb, owner, REASON_REWRITE);
	endpoint = endpoint_lookup(&client);
	if (endpoint)
		ifindex = endpoint->ifindex;
	/* The frame may be addressed to the bridge above this device, and loopback keeps the type. */
	if (skb->pkt_type == PACKET_OTHERHOST && bpf_skb_change_type(skb, PACKET_HOST))
		return drop_for(skb, owner, REASON_REWRITE);
	return bpf_redirect_neigh(ifindex, NULL, 0, 0);
}

/*
 * p is a reply of a host port to the gateway, but its entries were lost. The stack
 * would refuse it and end the connection. If it is dropped, the client's next
 * packet restores the entries.
 */
static __always_inline bool hairpin_is_orphan_reply(struct __sk_buff *skb, const struct packet *p)
{
	return p->protocol == IPPROTO_TCP && !p->tcp_syn && masq_in_range(p->dport) &&
	       host_port_reverse(&p->src, p->sport, p->protocol) && fib_is_local(skb, p) &&
	       socket_lookup_packet(skb, p) == SOCKET_NONE;
}

/*
 * What the container behind device sends to this host: replies to hairpin clients,
 * and packets to host ports. sender is the endpoint with p's source, or NULL.
 */
static __always_inline int hairpin_from_container(struct __sk_buff *skb, const struct packet *p,
						  const struct device *device,
						  const struct endpoint *sender)
{
	struct flow *flow = masq_track_reply(p);
	struct host_port *port;

	if (flow && sender && flow->owner == sender->owner)
		return hairpin_reply(skb, p, flow);
	if (hairpin_is_orphan_reply(skb, p))
		return drop_for(skb, device ? device->owner : OWNER_HOST, REASON_NO_FLOW);
	port = host_port_lookup(p);
	if (!port || addr_is_loopback(&p->dst, p->ipv6) || !fib_is_local(skb, p))
		return VERDICT_NEXT;
	if (!host_port_trusts_source(port, device, sender) || !host_port_allows(p, port))
		return drop_for(skb, port->owner, REASON_SRC_RANGE);
	return hairpin_to_endpoint(skb, p, port);
}
