/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Translates a packet and forwards it. */
#pragma once

#include "bypass.h"
#include "flow.h"
#include "host_port.h"

/*
 * Gives p, received from the outside, the destination addr:port: that of the
 * container to, or the host's if to is NULL. Bypasses the stack if possible.
 */
static __noinline int forward_dnat(struct __sk_buff *skb, const struct packet *p,
				   struct endpoint *to, const struct addr *addr, __u16 port)
{
	int verdict = to && p->l3 ? bypass_from_uplink(skb, p, to, addr, port) : VERDICT_NEXT;

	if (verdict != VERDICT_DROP && rewrite(skb, p, SIDE_DST, addr, port))
		return drop(skb, REASON_REWRITE);
	return verdict;
}

/* Gives p, which leaves for the outside, the source addr:port. */
static __noinline int forward_snat(struct __sk_buff *skb, const struct packet *p,
				   const struct addr *addr, __u16 port)
{
	if (p->bypass)
		fwd_cache_store_egress(skb, p, addr, port);
	if (rewrite(skb, p, SIDE_SRC, addr, port))
		return drop(skb, REASON_REWRITE);
	return VERDICT_NEXT;
}

/*
 * Forwards p to the container that it is addressed to. The sender has a route to
 * the container and expects replies from its address. If they would otherwise be
 * masqueraded, or get a host port's address, an entry prevents that.
 */
static __always_inline int forward_to_endpoint(struct __sk_buff *skb, const struct packet *p,
					       struct endpoint *to)
{
	struct flow_key key;
	struct flow *flow;

	if (p->icmp_error)
		return VERDICT_NEXT;
	flow_dnat_key(&key, p, &p->dst, p->dport);
	flow = flow_dnat_lookup(&key, p, to->owner);
	if (flow)
		flow_touch(&key, flow, p, false);
	else if (to->flags & ENDPOINT_MASQ || host_port_reverse(&p->dst, p->dport, p->protocol) ||
		 bpf_map_lookup_elem(&flows, &key))
		flow_dnat_replace(&key, p, to->owner);
	return forward_dnat(skb, p, to, &p->dst, p->dport);
}
