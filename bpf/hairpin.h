/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Clients of host ports that a container could not answer, or would answer past
 * us: those on this host (127.0.0.1, ::1, its own addresses), other containers
 * and the container itself. They are given the gateway as their address, which
 * is two entries in flows: one of a masqueraded connection from the client to
 * the container, and the usual one of a host port. Neither way touches the
 * stack, which would take such addresses for forged ones.
 */
#pragma once

#include "frag_queue.h"
#include "masq.h"
#include "host_port.h"
#include "rewrite.h"
#include "verdict.h"

#define LOOPBACK_IFINDEX 1

/* Sends the client's packet to the container as the gateway's. */
static __noinline int hairpin_to_endpoint(struct __sk_buff *skb, const struct packet *p,
					  const struct host_port *port)
{
	struct endpoint *endpoint = bpf_map_lookup_elem(&endpoints, &port->target_addr);
	struct packet translated = *p;
	struct flow_key key;

	if (!endpoint)
		return VERDICT_NEXT;
	translated.dst = port->target_addr;
	translated.dport = port->target_port;
	masq_key(&key, &translated, &endpoint->gateway);
	if (!masq_lookup(&translated, &key, port->owner) &&
	    !masq_recover(&translated, &key, port->owner)) {
		if (is_host_connection(skb, p))
			return VERDICT_NEXT;
		if (p->icmp_error)
			return drop_for(skb, port->owner, REASON_NO_FLOW);
		if (!masq_alloc_port(skb, &translated, &key, port->owner))
			return drop_for(skb, port->owner, REASON_NO_PORT);
	}

	/* To the container's answers the client is the gateway, and asked for p's destination. */
	translated.src = endpoint->gateway;
	translated.sport = key.local_port;
	translated.dst = p->dst;
	translated.dport = p->dport;
	flow_dnat_key(&key, &translated, &port->target_addr, port->target_port);
	if (!flow_dnat_matches(&key, &translated, port->owner) &&
	    flow_dnat_store(&key, &translated, port->owner))
		return drop_for(skb, port->owner, REASON_REWRITE);

	if (rewrite(skb, p, SIDE_DST, &port->target_addr, port->target_port) ||
	    rewrite(skb, p, SIDE_SRC, &translated.src, translated.sport))
		return drop_for(skb, port->owner, REASON_REWRITE);
	return bpf_redirect_neigh(endpoint->ifindex, NULL, 0, 0);
}

/* Sends a container's answer to the gateway to the client that it is for. */
static __noinline int hairpin_reply(struct __sk_buff *skb, const struct packet *p,
				    const struct flow *out)
{
	struct flow *in = flow_reply(p) ?: flow_reply_lost(p);
	struct addr client = out->nat_addr, asked;
	__u16 client_port = out->nat_port;
	__u64 owner = out->owner;
	__u32 ifindex = LOOPBACK_IFINDEX;
	struct endpoint *endpoint;

	if (!in)
		return drop_for(skb, owner, REASON_NO_FLOW);
	asked = in->nat_addr;
	if (rewrite(skb, p, SIDE_SRC, &asked, in->nat_port) ||
	    rewrite(skb, p, SIDE_DST, &client, client_port))
		return drop_for(skb, owner, REASON_REWRITE);
	endpoint = bpf_map_lookup_elem(&endpoints, &client);
	if (endpoint)
		ifindex = endpoint->ifindex;
	/* The frame may be a bridge's, whose port this is; loopback takes the type as it is. */
	if (skb->pkt_type == PACKET_OTHERHOST && bpf_skb_change_type(skb, PACKET_HOST))
		return drop_for(skb, owner, REASON_REWRITE);
	return bpf_redirect_neigh(ifindex, NULL, 0, 0);
}
