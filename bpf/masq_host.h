/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The host's own connections from ports of the masquerading range. A socket can be
 * bound to such a port after a container's flow to the same remote has got it. The
 * replies belong to the container, so the host's connection is moved to another
 * port: one entry translates its replies, a second keeps it on that port.
 */
#pragma once

#include "fib.h"
#include "forward.h"
#include "masq.h"
#include "socket.h"

#define CLIENT_PORT_MIN 32768 /* ip_local_port_range's default; other systems start higher */

/*
 * The host refuses a segment that belongs to none of its sockets. It may belong to
 * a masqueraded flow whose entry was lost, which the container's next packet
 * restores, unless the remote has been refused before. A remote with a client's
 * port is refused all the same: it may have used a host port that is closed now.
 */
static __always_inline bool masq_host_rst_is_spurious(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key = {
		.remote = p->dst,
		.local = p->src,
		.remote_port = p->dport,
		.local_port = p->sport,
		.protocol = p->protocol,
	};

	return p->tcp_rst_noack && p->dport < CLIENT_PORT_MIN &&
	       fib_lookup(skb, p, &p->src) == BPF_FIB_LKUP_RET_NOT_FWDED &&
	       socket_lookup(skb, &key, p->ipv6) == SOCKET_NONE;
}

/* Keeps the moved connection on the port in key. Returns false if another flow has got it. */
static __always_inline bool masq_host_keep_port(const struct packet *p, const struct flow_key *key)
{
	struct flow *flow = bpf_map_lookup_elem(&flows, key);
	struct flow new;

	if (!flow) {
		masq_flow(&new, p, OWNER_HOST);
		return !p->icmp_error && masq_insert(key, &new);
	}
	if (!masq_matches(flow, p, OWNER_HOST))
		return false;
	flow_touch(key, flow, p, false);
	return true;
}

/* Moves p's connection to another port if its own is a container's. */
static __noinline int masq_host(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key;
	struct flow *moved;

	if (!p->has_ports || !masq_in_range(p->sport))
		return VERDICT_NEXT;
	if (masq_host_rst_is_spurious(skb, p))
		return drop(skb, REASON_NO_FLOW);
	masq_key(&key, p, &p->src);
	moved = flow_track_reply(p);
	if (moved) {
		key.local_port = moved->nat_port;
		if (masq_host_keep_port(p, &key))
			return forward_snat(skb, p, &p->src, key.local_port);
	} else {
		key.local_port = p->sport;
		if (!bpf_map_lookup_elem(&flows, &key))
			return VERDICT_NEXT;
	}
	if (p->icmp_error)
		return VERDICT_NEXT;
	if (!masq_alloc_port(skb, p, &key, OWNER_HOST))
		return drop(skb, REASON_NO_PORT);
	if (flow_store_reply(p, &p->src, key.local_port, OWNER_HOST))
		return drop(skb, REASON_REWRITE);
	return forward_snat(skb, p, &p->src, key.local_port);
}
