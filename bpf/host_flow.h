/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flows of the host: what it sends from its sockets, or translated by its conntrack. An
 * entry of OWNER_HOST keeps the port from containers, and leaves replies to the stack.
 * Sockets of TCP and UDP need no entry, because lookups find them. If a container's flow
 * already has the port, the host's connection is moved to another one: one entry
 * translates its replies, a second one keeps it on that port.
 */
#pragma once

#include "fib.h"
#include "forward.h"
#include "masq.h"
#include "socket.h"

#define CLIENT_PORT_MIN 32768 /* ip_local_port_range's default; other systems start higher */

/* Records the tuple until the entry is evicted. Reports whether it was recorded before. */
static __always_inline bool host_flow_held_rst(const struct flow_key *key)
{
	struct flow held = {.last_seen = now_ticks(), .state = FLOW_OTHER};

	return bpf_map_update_elem(&flows, key, &held, BPF_NOEXIST) != 0;
}

/*
 * Reports whether p is the first RST by which the host refuses a segment of none of its
 * sockets. The segment may belong to a masqueraded flow whose entry was lost, and which
 * the container's next packet restores. So the first RST of a tuple is held back. RSTs to
 * a client's port, and from a former host port, are not: the remote may be the client of a
 * removed service.
 */
static __always_inline bool host_flow_rst_is_spurious(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key;

	flow_sent_key(&key, p, FLOW_RST_HELD);
	return p->tcp_rst && !p->tcp_ack && p->dport < CLIENT_PORT_MIN && masq_in_range(p->sport) &&
	       !is_host_port_number(p->protocol, p->sport) &&
	       fib_lookup(skb, p, &p->src) == BPF_FIB_LKUP_RET_NOT_FWDED &&
	       socket_lookup(skb, &key, p->ipv6) == SOCKET_NONE && !host_flow_held_rst(&key);
}

/*
 * Reports whether p is from a socket of the host that receives the replies: masq_port_in_use
 * finds it.
 */
static __always_inline bool is_from_own_socket(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *sk = skb->sk;

	return sk && is_tcp_or_udp(p->protocol) && sk->src_port == p->sport;
}

/*
 * Reports whether a live client of a host port is connected to p's source. Removes the flow of
 * a client that the container has not replied to.
 */
static __noinline bool host_flow_yields_to_host_port(const struct packet *p)
{
	struct masq_args *args = masq_scratch_get();
	struct host_port *port = NULL;
	struct dnat d;

	if (is_host_port_number(p->protocol, p->sport))
		port = host_port_find(&p->src, p->sport, p->protocol, p->ipv6);
	if (!port || !args)
		return false;
	args->tuple.src = p->dst;
	args->tuple.dst = p->src;
	args->tuple.sport = p->dport;
	args->tuple.dport = p->sport;
	args->tuple.protocol = p->protocol;
	dnat_init(&d, &args->tuple, &port->target_addr, port->target_port);
	dnat_find(&args->tuple, &d, port->owner, false);
	if (!d.flow || flow_is_live(d.flow))
		return d.flow;
	flow_remove(&d.key);
	return false;
}

/* Reports whether the host may use the port of another flow's entry. */
static __always_inline bool host_flow_may_replace(const struct flow_key *key,
						  const struct flow *flow, const struct packet *p)
{
	return !p->has_ports || !flow_is_live(flow) || !flow_owner_is_alive(key, flow);
}

/* Creates the host flow with the key for p, which the host sends. */
static __noinline int host_flow_create(struct __sk_buff *skb, const struct packet *p,
				       const struct flow_key *key)
{
	struct flow flow = {
		.owner = OWNER_HOST,
		.nat_addr = p->src,
		.nat_port = p->sport,
		.uplink = skb->ifindex,
	};

	if (p->icmp_error || p->tcp_rst || p->sctp_abort)
		return VERDICT_NEXT;
	flow_open(&flow, p, FROM_CONTAINER);
	flow_remove(key);
	bpf_map_update_elem(&flows, key, &flow, BPF_NOEXIST);
	return VERDICT_NEXT;
}

/*
 * Moves p's connection to a port that no container has: the one that it was moved to
 * before, or the first free one.
 */
static __noinline int host_flow_move(struct __sk_buff *skb, struct packet *p,
				     const struct flow *moved)
{
	struct masq_args *args = masq_scratch_get();

	if (!args)
		return VERDICT_NEXT;
	masq_init(args, packet_tuple(p), &p->src, OWNER_HOST, 0);
	args->flow.uplink = skb->ifindex;
	if (!masq_keep_port(skb, moved ? moved->nat_port : 0)) {
		if (p->icmp_error || p->tcp_rst)
			return VERDICT_NEXT;
		if (!masq_alloc_port(skb))
			return drop(skb, REASON_NO_PORT);
	}
	if (!moved || moved->nat_port != args->key.local_port)
		flow_store_reply(p, &p->src, args->key.local_port, OWNER_HOST);
	return forward_snat(skb, p, &p->src, args->key.local_port);
}

/*
 * Tracks the host flow of the packet in pkt_scratch, which the host sends to an uplink or a
 * container.
 */
__noinline int host_flow_sent(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct flow *flow, *moved;
	struct flow_key key;
	bool own_socket;

	if (!p || !port_may_be_ours(p, p->sport) || addr_is_link_scoped(&p->dst, p->ipv6))
		return VERDICT_NEXT;
	if (host_flow_rst_is_spurious(skb, p))
		return drop(skb, REASON_NO_FLOW);
	flow_sent_key(&key, p, FLOW_SNAT);
	own_socket = is_from_own_socket(skb, p);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow && skb->ingress_ifindex && !fib_is_local_addr(skb, &p->src, p->ipv6))
		return VERDICT_NEXT; /* a packet of another host, which the stack forwards */
	if (!flow && !(own_socket && p->protocol == IPPROTO_TCP && !p->tcp_syn))
		flow = flow_recover(&key);
	if (flow && flow->owner == OWNER_HOST && flow->nat_port == p->sport) {
		if ((!flow_expired(flow) && !flow_ended(flow)) ||
		    !host_flow_yields_to_host_port(p)) {
			flow_touch(&key, flow, p, FROM_CONTAINER);
			return VERDICT_NEXT;
		}
		flow_remove(
			&key); /* of a former connection: the host port's client has the port now */
		flow = NULL;
	}
	moved = p->has_ports ? flow_track_reply(p, OWNER_HOST) : NULL;
	if (moved)
		return host_flow_move(skb, p, moved);
	if ((flow && !host_flow_may_replace(&key, flow, p)) || host_flow_yields_to_host_port(p))
		return host_flow_move(skb, p, NULL);
	if (!own_socket)
		return host_flow_create(skb, p, &key);
	if (flow)
		flow_remove(&key);
	return VERDICT_NEXT;
}
