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

#include "hold.h"
#include "masq.h"
#include "port.h"
#include "rewrite.h"
#include "verdict.h"

#define LOOPBACK_IFINDEX 1

/* Sends the client's packet to the container as the gateway's. */
static __noinline int here_to_port(struct __sk_buff *skb, const struct packet *p,
				   const struct port *port)
{
	struct endpoint *endpoint = bpf_map_lookup_elem(&endpoints, &port->addr);
	struct packet translated = *p;
	struct flow_key key;

	if (!endpoint)
		return VERDICT_NEXT;
	translated.dst = port->addr;
	translated.dport = port->port;
	masq_key(&key, &translated, &endpoint->gateway);
	if (!masq_find(&translated, &key, port->owner) &&
	    !masq_find_lost(&translated, &key, port->owner)) {
		if (is_hosts_own(skb, p))
			return VERDICT_NEXT;
		if (p->error)
			return drop_of(skb, port->owner, REASON_NO_FLOW);
		if (!masq_claim(skb, &translated, &key, port->owner))
			return drop_of(skb, port->owner, REASON_NO_PORT);
	}

	/* To the container's answers the client is the gateway, and asked for p's destination. */
	translated.src = endpoint->gateway;
	translated.sport = key.local_port;
	translated.dst = p->dst;
	translated.dport = p->dport;
	flow_in_key(&key, &translated, &port->addr, port->port);
	if (!flow_fits(&key, &translated, port->owner) &&
	    flow_remember(&key, &translated, port->owner))
		return drop_of(skb, port->owner, REASON_NOT_WRITTEN);

	if (rewrite(skb, p, SIDE_DST, &port->addr, port->port) ||
	    rewrite(skb, p, SIDE_SRC, &translated.src, translated.sport))
		return drop_of(skb, port->owner, REASON_NOT_WRITTEN);
	return bpf_redirect_neigh(endpoint->ifindex, NULL, 0, 0);
}

/* Sends a container's answer to the gateway to the client that it is for. */
static __noinline int here_answer(struct __sk_buff *skb, const struct packet *p,
				  const struct flow *out)
{
	struct flow *in = flow_reply(p) ?: flow_reply_lost(p);
	struct addr client = out->addr, asked;
	__u16 client_port = out->port;
	__u64 owner = out->owner;
	__u32 ifindex = LOOPBACK_IFINDEX;
	struct endpoint *endpoint;

	if (!in)
		return drop_of(skb, owner, REASON_NO_FLOW);
	asked = in->addr;
	if (rewrite(skb, p, SIDE_SRC, &asked, in->port) ||
	    rewrite(skb, p, SIDE_DST, &client, client_port))
		return drop_of(skb, owner, REASON_NOT_WRITTEN);
	endpoint = bpf_map_lookup_elem(&endpoints, &client);
	if (endpoint)
		ifindex = endpoint->ifindex;
	/* The frame may be a bridge's, whose port this is; loopback takes the type as it is. */
	if (skb->pkt_type == PACKET_OTHERHOST && bpf_skb_change_type(skb, PACKET_HOST))
		return drop_of(skb, owner, REASON_NOT_WRITTEN);
	return bpf_redirect_neigh(ifindex, NULL, 0, 0);
}
