/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flows of packets. Functions named track find the packet's flow and update it; lookups only
 * read.
 */
#pragma once

#include "flow_table.h"

/*
 * Finds and updates the flow of owner to which p, sent by a container, is a reply; or NULL. A
 * flow of a former container with the address has another owner. direct as in struct flow_args.
 */
static __noinline struct flow *flow_track_sent(const struct packet *p, __u64 owner, bool direct)
{
	struct flow_args *args = flow_scratch_get();

	if (!args || packet_opens(p) || !port_may_be_marked(PORT_REPLIES, p->protocol, p->sport))
		return NULL;
	flow_sent_key(&args->key, packet_tuple(p), FLOW_DNAT);
	args->new.owner = owner;
	args->direct = direct;
	return flow_access(FLOW_SENT) ? &args->flow : NULL;
}

/*
 * Reports whether the packet in pkt_scratch replies to a remote that has a route to the container, so that it keeps its source. Only
 * if the container has not opened the connection itself: anyone can send a packet under a remote's address that makes such
 * a flow.
 */
__noinline int flow_track_direct_reply(__u64 owner)
{
	struct packet *p = pkt_scratch_get();

	return p && flow_track_sent(p, owner, true);
}

/* Creates the flow to which p is a reply: the client used addr:port. Returns false if it cannot. */
static __noinline bool flow_store_reply(const struct packet *p, const struct addr *addr, __u16 port,
					__u64 owner)
{
	struct flow_args *args = flow_scratch_get();

	if (!args)
		return false;
	flow_sent_key(&args->key, packet_tuple(p), FLOW_DNAT);
	__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.owner = owner;
	args->new.nat_addr = *addr;
	args->new.nat_port = port;
	args->new.remote_port = p->dport;
	flow_open(&args->new, p, FROM_CONTAINER, now_ticks());
	args->new.flags |= FLOW_REPLIED;
	flow_access(FLOW_READ);
	return flow_insert();
}
