/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Masquerades packets from containers to the outside, and drops those that it cannot masquerade. */
#pragma once

#include "forward.h"
#include "frag_queue.h"
#include "masq.h"
#include "tunnel.h"

/* Gives p the source of the flow with the key, and has uplink_repeat do the same for a moment. */
static __always_inline int masq_forward(struct __sk_buff *skb, struct packet *p,
					const struct flow_key *key)
{
	p->decided.flow_kind = FLOW_SNAT;
	return forward_snat(skb, p, &key->local, key->local_port);
}

/*
 * Masquerades p, or translates it as a reply whose entry was lost. NOT_HANDLED: p keeps its source. By default,
 * containers use no tunnels under the host's address, because replies could be the host's.
 */
static __noinline int masq_endpoint(struct __sk_buff *skb, struct packet *p,
				    const struct endpoint *endpoint)
{
	struct masq_args *args = masq_scratch_get();
	__u64 owner = endpoint->owner;
	struct host_port *port;
	struct addr source;
	int verdict;

	if (!args)
		return VERDICT_DROP;
	/* The checksums of DCCP and UDP-Lite cover the addresses, and are not updated. */
	if (p->protocol == IPPROTO_DCCP || p->protocol == IPPROTO_UDPLITE ||
	    (is_tunnel(p->protocol) && !(endpoint->flags & ENDPOINT_MASQ_TUNNELS)))
		return flow_track_direct_reply(owner) ? NOT_HANDLED
						      : drop_for(skb, owner, REASON_PROTOCOL);
	if (!masq_source(skb, p, &source))
		return drop_for(skb, owner, REASON_NO_SOURCE);
	masq_init(args, packet_tuple(p), &source, owner, 0);
	args->flow.uplink = skb->ifindex;
	if (masq_find() || masq_find_former(skb))
		return masq_forward(skb, p, &args->key);
	if (flow_track_direct_reply(owner))
		return NOT_HANDLED;
	port = host_port_lookup_reply(p);
	if (port) {
		verdict = host_port_reply(skb, p, port);
		if (verdict != NOT_HANDLED)
			return verdict;
	}
	/* Replies, errors, and what follows an SCTP INIT belong to a flow, and open none. */
	if (p->echo_reply || p->icmp_error || (p->protocol == IPPROTO_SCTP && !p->sctp_init))
		return drop_for(skb, owner, REASON_NO_FLOW);
	if (!masq_alloc_port(skb))
		return drop_for(skb, owner, REASON_NO_PORT);
	p->decided.first = p->protocol == IPPROTO_UDP;
	return masq_forward(skb, p, &args->key);
}

/* Handles the endpoint's p, whose ports are unknown. A fragment waits for the first one. */
static __always_inline int masq_unparsed(struct __sk_buff *skb, const struct packet *p,
					 const struct endpoint *endpoint, int parsed)
{
	if (node_is_tunnel(p->ifindex) || (node_any() && node_lookup(&p->dst)) ||
	    masq_skips(endpoint, p))
		return VERDICT_NEXT;
	if (parsed == PARSED_FRAGMENT)
		return frag_queue_add(skb, p) ? end_uncounted()
					      : drop_for(skb, endpoint->owner, REASON_FRAGMENT);
	return drop_for(skb, endpoint->owner,
			parsed == PARSED_PROTOCOL ? REASON_PROTOCOL : REASON_TRUNCATED);
}
