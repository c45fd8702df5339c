/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Masquerading of what containers send to the outside. What cannot be masqueraded is dropped. */
#pragma once

#include "fib.h"
#include "forward.h"
#include "frag_queue.h"
#include "host_port_forward.h"
#include "masq.h"

/* Masquerades p, or translates it as a reply whose entry was lost. */
static __noinline int masq_endpoint(struct __sk_buff *skb, const struct packet *p, __u64 owner)
{
	struct addr source;
	struct flow_key key;
	struct flow *flow;
	struct host_port *port;

	if (!fib_source(skb, p, &source))
		return drop_for(skb, owner, REASON_NO_SOURCE);
	masq_key(&key, p, &source);
	if (masq_track(p, &key, owner))
		return forward_snat(skb, p, &source, key.local_port);
	flow = flow_recover_reply(p);
	if (flow && flow->owner == owner)
		return forward_snat(skb, p, &flow->nat_addr, flow->nat_port);
	if (masq_recover(p, &key, owner))
		return forward_snat(skb, p, &source, key.local_port);
	port = host_port_lookup_reply(p);
	if (port)
		return host_port_reply(skb, p, port);
	if (p->echo_reply || p->icmp_error) /* belongs to an unknown flow, and opens none */
		return drop_for(skb, owner, REASON_NO_FLOW);
	if (!masq_alloc_port(skb, p, &key, owner))
		return drop_for(skb, owner, REASON_NO_PORT);
	return forward_snat(skb, p, &source, key.local_port);
}

static __always_inline enum reason masq_unparsed_reason(int parsed)
{
	switch (parsed) {
	case PARSED_FRAGMENT:
		return REASON_FRAGMENT;
	case PARSED_PROTOCOL:
		return REASON_PROTOCOL;
	default:
		return REASON_TRUNCATED;
	}
}

/* Handles the endpoint's p, which has no ports. A fragment waits for those of the first one. */
static __always_inline int masq_unparsed(struct __sk_buff *skb, const struct packet *p,
					 const struct endpoint *endpoint, int parsed)
{
	if (masq_skips(endpoint, p))
		return VERDICT_NEXT;
	if (parsed == PARSED_FRAGMENT && frag_queue_add(skb, p))
		return VERDICT_DROP;
	return drop_for(skb, endpoint->owner, masq_unparsed_reason(parsed));
}
