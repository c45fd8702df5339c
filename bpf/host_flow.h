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

/* Records the tuple for a while. Reports whether it was recorded before. */
static __always_inline bool host_flow_held_rst(const struct flow_key *key)
{
	struct flow_args *args = flow_scratch_get();

	if (!args)
		return true;
	args->key = *key;
	if (flow_lookup(args) && !flow_expired(&args->flow))
		return true;
	__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.last_seen = now_ticks();
	args->new.state = FLOW_OTHER;
	return !flow_insert();
}

/*
 * Reports whether p is the first RST by which the host refuses a segment that no socket expects. The segment may belong to a
 * masqueraded flow whose entry was lost, and which the container's next packet restores. So the first RST of a tuple is held
 * back. RSTs to a client's port, and from a former host port, are not: the remote may be the client of a removed service.
 */
static __always_inline bool host_flow_rst_is_spurious(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key;

	flow_sent_key(&key, packet_tuple(p), FLOW_RST_HELD);
	return p->tcp_rst && !p->tcp_ack && p->dport < CLIENT_PORT_MIN && masq_in_range(p->sport) &&
	       !is_host_port_number(p->protocol, p->sport) &&
	       fib_lookup(skb, p, &p->src) == BPF_FIB_LKUP_RET_NOT_FWDED &&
	       socket_lookup(skb, &key, p->ipv6) == SOCKET_NONE && !host_flow_held_rst(&key);
}

/*
 * Reports whether p is from a socket of the host that receives the replies: masq_port_in_use
 * finds it. From the number of a host port, that is only a connected one.
 */
static __always_inline bool is_from_own_socket(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *sk = skb->sk;

	return sk && is_tcp_or_udp(p->protocol) && sk->src_port == p->sport &&
	       (p->protocol == IPPROTO_TCP || sk->dst_port ||
		!is_host_port_number(p->protocol, p->sport));
}

/*
 * Reports whether a live client of a host port is connected to p's source. Removes the flow of
 * a client that the container has not replied to.
 */
static __noinline bool host_flow_yields_to_host_port(const struct packet *p)
{
	struct masq_args *args = masq_scratch_get();
	struct host_port *port = NULL;
	struct flow *flow;
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
	flow = dnat_find(&args->tuple, &d, port->owner, false);
	if (!flow || flow_is_live(flow))
		return flow;
	flow_remove();
	return false;
}

/* Returns a copy of the flow to which replies to p, which the host sends, belong; or NULL. */
static __noinline struct flow *host_flow_lookup(const struct packet *p)
{
	struct flow_args *args = flow_scratch_get();

	if (!args)
		return NULL;
	flow_sent_key(&args->key, packet_tuple(p), FLOW_SNAT);
	return flow_lookup(args);
}

/* Creates the host flow for p, which the host sends. */
static __noinline int host_flow_create(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_args *args = flow_scratch_get();

	if (!args || p->icmp_error || p->tcp_rst || p->sctp_abort)
		return VERDICT_NEXT;
	host_flow_lookup(p);
	__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.nat_addr = p->src;
	args->new.nat_port = p->sport;
	args->new.uplink = skb->ifindex;
	flow_open(&args->new, p, FROM_CONTAINER, now_ticks());
	flow_insert();
	return VERDICT_NEXT;
}

/*
 * Moves p's connection to a port that no container has: the one that it was moved to
 * before, or the first free one if that is 0.
 */
static __noinline int host_flow_move(struct __sk_buff *skb, struct packet *p, __u32 port)
{
	struct masq_args *args = masq_scratch_get();

	if (!args)
		return VERDICT_NEXT;
	masq_init(args, packet_tuple(p), &p->src, OWNER_HOST, 0);
	args->flow.uplink = skb->ifindex;
	if (!masq_keep_port(skb, port)) {
		if (p->icmp_error || p->tcp_rst)
			return VERDICT_NEXT;
		if (!masq_alloc_port(skb))
			return drop(skb, REASON_NO_PORT);
	}
	if (port != args->key.local_port)
		flow_store_reply(p, &p->src, args->key.local_port, OWNER_HOST);
	return forward_snat(skb, p, &p->src, args->key.local_port);
}

/*
 * Tracks the host flow of the packet in pkt_scratch, which the host sends to an uplink or a
 * container.
 */
__noinline int host_flow_sent(struct __sk_buff *skb)
{
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	bool taken;
	struct flow *flow;

	if (!args || !p || !port_may_be_ours(p, p->sport) || addr_is_link_scoped(&p->dst, p->ipv6))
		return VERDICT_NEXT;
	if (host_flow_rst_is_spurious(skb, p))
		return drop(skb, REASON_NO_FLOW);
	flow = host_flow_lookup(p);
	if (!flow && packet_ingress(skb, p) && !fib_is_local_addr(skb, &p->src, p->ipv6))
		return VERDICT_NEXT; /* a packet of another host, which the stack forwards */
	if (flow && flow->owner == OWNER_HOST && flow->nat_port == p->sport) {
		bool former = (flow_expired(flow) || flow_ended(flow)) &&
			      host_flow_yields_to_host_port(p);

		host_flow_lookup(p);
		if (!former) {
			flow_track(FROM_CONTAINER);
			return VERDICT_NEXT;
		}
		flow_remove(); /* the host port's client has the port now */
		flow = NULL;
	}
	taken = flow && p->has_ports && flow_is_live(flow) && flow_owner_is_alive(&args->key, flow);
	flow = p->has_ports ? flow_track_sent(p, OWNER_HOST, false) : NULL;
	if (flow)
		return host_flow_move(skb, p, flow->nat_port);
	if (taken || host_flow_yields_to_host_port(p))
		return host_flow_move(skb, p, 0);
	if (!is_from_own_socket(skb, p))
		return host_flow_create(skb, p);
	if (host_flow_lookup(p))
		flow_remove();
	return VERDICT_NEXT;
}
