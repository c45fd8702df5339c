/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Whether an uplink can have received a packet with these addresses. They are judged before ports, so that no header hides the
 * sender. Packets that the forwarding cache handles are not judged again.
 */
#pragma once

#include "endpoint.h"
#include "fib.h"
#include "node.h"
#include "spoof.h"
#include "verdict.h"

/*
 * Reports whether the frame has a priority tag (VLAN 0) behind another one. The stack removes them
 * all, but after this hook.
 */
static __always_inline bool has_second_tag(struct __sk_buff *skb, __u32 l3)
{
	struct vlan_tag *tag;

	if (!is_vlan(skb->protocol) || has_vlan(skb))
		return false;
	tag = bytes_at(skb, l3, sizeof(*tag));
	return tag && !(tag->tag & bpf_htons(VLAN_ID));
}

/*
 * Drops the packet in pkt_scratch if the uplink cannot have received it, or if no container has
 * its destination. NOT_HANDLED: it may pass. parsed says which of its fields are known.
 */
__noinline int uplink_refuse(struct __sk_buff *skb, __u32 parsed)
{
	struct packet *p = pkt_scratch_get();
	struct endpoint *sender;
	const struct addr *src;

	if (!p)
		return NOT_HANDLED;
	if (parsed == PARSED_NOT_IP)
		return has_second_tag(skb, p->l3) ? drop(skb, REASON_HEADERS) : NOT_HANDLED;
	src = p->icmp_error ? &p->outer_src : &p->src;
	sender = endpoint_lookup(src);
	if (sender)
		return drop_for(skb, sender->owner, REASON_OWN_SOURCE);
	if (node_is_tunnel(skb->ifindex))
		return endpoint_lookup(&p->dst) || !fib_leads_out(skb, p)
			       ? NOT_HANDLED
			       : drop(skb, REASON_NO_ENDPOINT);
	/* forward_to_endpoint judges the others. */
	if ((parsed != PARSED || p->icmp_error) && endpoint_lookup(&p->dst) &&
	    node_origin(src, skb->ifindex) == ORIGIN_FORGED)
		return drop(skb, REASON_NODE);
	return NOT_HANDLED;
}
