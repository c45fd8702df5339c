/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the host itself sends, translated by its conntrack or from its sockets, claims
 * its tuple: an entry of OWNER_HOST keeps the port from containers, and leaves the
 * replies to the stack. Sockets of TCP and UDP need no entry: lookups find them. If a
 * container's flow has the port already, the host's connection is moved to another
 * port: one entry translates its replies, a second keeps it on that port.
 */
#pragma once

#include "fib.h"
#include "forward.h"
#include "masq.h"
#include "socket.h"

#define CLIENT_PORT_MIN 32768 /* ip_local_port_range's default; other systems start higher */

/* Notes the tuple until the entry is evicted. Returns whether it was noted before. */
static __always_inline bool masq_host_held_rst(const struct flow_key *key)
{
	struct flow held = {.last_seen = now_ticks(), .state = FLOW_OTHER};

	return bpf_map_update_elem(&flows, key, &held, BPF_NOEXIST) != 0;
}

/*
 * The host refuses a segment that belongs to none of its sockets. It may belong to
 * a masqueraded flow whose entry was lost, which the container's next packet
 * restores, unless the remote has been refused before. So the first RST of a tuple
 * is held back. A remote with a client's port is refused at once: it may have used a
 * service that has ended; and so is the client of what was a host port.
 */
static __always_inline bool masq_host_rst_is_spurious(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key;

	flow_sent_key(&key, p, FLOW_RST_HELD);
	return p->tcp_rst && !p->tcp_ack && p->dport < CLIENT_PORT_MIN && masq_in_range(p->sport) &&
	       !is_host_port_number(p->protocol, p->sport) &&
	       fib_lookup(skb, p, &p->src) == BPF_FIB_LKUP_RET_NOT_FWDED &&
	       socket_lookup(skb, &key, p->ipv6) == SOCKET_NONE && !masq_host_held_rst(&key);
}

/* p is from a socket of the host that receives the replies: masq_port_in_use sees it. */
static __always_inline bool is_from_own_socket(struct __sk_buff *skb, const struct packet *p)
{
	struct bpf_sock *sk = skb->sk;

	return sk && is_tcp_or_udp(p->protocol) && sk->src_port == p->sport;
}

/*
 * A client of a host port is connected to p's source. One that the container has not
 * replied to loses the tuple.
 */
static __noinline bool masq_host_is_host_port(const struct packet *p)
{
	struct host_port *port = NULL;
	struct fwd_key received = {
		.src = p->dst,
		.dst = p->src,
		.sport = p->dport,
		.dport = p->sport,
		.protocol = p->protocol,
	};
	struct dnat d;

	if (is_host_port_number(p->protocol, p->sport))
		port = host_port_find(&p->src, p->sport, p->protocol, p->ipv6);
	if (!port)
		return false;
	dnat_init(&d, &received, &port->target_addr, port->target_port);
	dnat_find(&received, &d, port->owner, false);
	if (!d.flow || flow_is_live(d.flow))
		return d.flow;
	flow_remove(&d.key);
	return false;
}

/* The entry of another flow does not keep the host from using its port. */
static __always_inline bool masq_host_may_replace(const struct flow_key *key,
						  const struct flow *flow, const struct packet *p)
{
	return !p->has_ports || !flow_is_live(flow) || !flow_owner_is_alive(key, flow);
}

/* Claims the tuple in the key for p, which the host sends. */
static __noinline int masq_host_claim(struct __sk_buff *skb, const struct packet *p,
				      const struct flow_key *key)
{
	struct flow claim = {
		.owner = OWNER_HOST,
		.nat_addr = p->src,
		.nat_port = p->sport,
		.uplink = skb->ifindex,
	};

	if (p->icmp_error || p->tcp_rst || p->sctp_abort)
		return VERDICT_NEXT;
	flow_open(&claim, p, FROM_CONTAINER);
	flow_remove(key);
	bpf_map_update_elem(&flows, key, &claim, BPF_NOEXIST);
	return VERDICT_NEXT;
}

/*
 * Moves p's connection to a port that no container has: the one that it was moved to
 * before, or the first free one.
 */
static __noinline int masq_host_move(struct __sk_buff *skb, struct packet *p,
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

/* Claims the tuple of the packet in pkt_scratch, which the host sends to an uplink or a container. */
__noinline int masq_host(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct flow *flow, *moved;
	struct flow_key key;
	bool own_socket;

	if (!p || !masq_could_own(p, p->sport) || addr_is_link_scoped(&p->dst, p->ipv6))
		return VERDICT_NEXT;
	if (masq_host_rst_is_spurious(skb, p))
		return drop(skb, REASON_NO_FLOW);
	flow_sent_key(&key, p, FLOW_SNAT);
	own_socket = is_from_own_socket(skb, p);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow && skb->ingress_ifindex && !fib_is_local_addr(skb, &p->src, p->ipv6))
		return VERDICT_NEXT; /* another host's, which the stack forwards */
	if (!flow && !(own_socket && p->protocol == IPPROTO_TCP && !p->tcp_syn))
		flow = flow_recover(&key);
	if (flow && flow->owner == OWNER_HOST && flow->nat_port == p->sport) {
		if ((!flow_expired(flow) && !flow_ended(flow)) || !masq_host_is_host_port(p)) {
			flow_touch(&key, flow, p, FROM_CONTAINER);
			return VERDICT_NEXT;
		}
		flow_remove(&key); /* a former connection's; the host port's client has it now */
		flow = NULL;
	}
	moved = p->has_ports ? flow_track_reply(p, OWNER_HOST) : NULL;
	if (moved)
		return masq_host_move(skb, p, moved);
	if ((flow && !masq_host_may_replace(&key, flow, p)) || masq_host_is_host_port(p))
		return masq_host_move(skb, p, NULL);
	if (!own_socket)
		return masq_host_claim(skb, p, &key);
	if (flow)
		flow_remove(&key);
	return VERDICT_NEXT;
}
