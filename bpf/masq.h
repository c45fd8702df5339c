/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Masquerading with a single entry per flow: (remote, our address, allocated port)
 * gives the container's address and port, and translates replies. Outbound packets
 * find their port by probing a fixed sequence of candidates, computed from their
 * own tuple. So no second entry can be lost alone, and a flow whose entry was
 * replaced gets the same port again.
 *
 * The functions take the flow from masq_scratch, and set its port there. Those that
 * the verifier checks on their own, and not for each caller, are global.
 */
#pragma once

#include "addr.h"
#include "fib.h"
#include "flow_table.h"
#include "host_port.h"
#include "masq_port.h"
#include "route_cache.h"
#include "socket.h"

#define MASQ_FREE_PROBES 4 /* then ports of the container's own ended flows are reused */

/* Reports whether packets of the endpoint to p's destination keep their source. */
static __always_inline bool masq_skips(const struct endpoint *endpoint, const struct packet *p)
{
	if (!(endpoint->flags & ENDPOINT_MASQ) || addr_is_link_scoped(&p->dst, p->ipv6))
		return true;
	return endpoint->nonmasq_set && prefix_lookup(&prefixes, endpoint->nonmasq_set, &p->dst);
}

/*
 * Reports whether a host port or a socket of the host receives packets of the key's remote to
 * the port.
 */
static __always_inline bool masq_port_in_use(struct __sk_buff *skb, const struct flow_key *key,
					     bool ipv6)
{
	if (!is_tcp_or_udp(key->protocol))
		return false;
	if (is_host_port_number(key->protocol, key->local_port) &&
	    host_port_find(&key->local, key->local_port, key->protocol, ipv6))
		return true;
	return socket_lookup(skb, key, ipv6) != SOCKET_NONE;
}

/* Returns how long a flow of p can have been idle. A SYN is a repetition, or opens a new flow. */
static __always_inline __u32 masq_idle_time(const struct masq_args *args, const struct packet *p)
{
	switch (args->key.protocol) {
	case IPPROTO_TCP:
		return config
			.timeout[p->tcp_syn && !args->read_only ? FLOW_SYN_SENT : FLOW_ESTABLISHED];
	case IPPROTO_UDP:
		return config.timeout[FLOW_UDP_STREAM];
	default:
		return config.timeout[FLOW_ICMP];
	}
}

/*
 * Returns the number of candidates that the flow can have. A protocol without ports, and SCTP, have
 * one: one container at a time can use it with a remote, or a port of SCTP.
 */
static __always_inline __u32 masq_candidates(const struct masq_args *args, const struct packet *p)
{
	if (!args->has_ports)
		return 1;
	return moved_candidates(moved_sides(&args->key.remote, &args->flow.nat_addr),
				args->flow.nat_port, masq_idle_time(args, p));
}

/*
 * Finds the flow of the packet in pkt_scratch. It searches all candidates that the flow may have,
 * because earlier ones may have become free.
 */
__noinline int masq_find(void)
{
	struct masq_args *args = masq_scratch_get();
	struct flow_args *flows = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	__u32 candidates;

	if (!args || !flows || !p)
		return false;
	candidates = masq_candidates(args, p);
	flows->new = args->flow;
	for (__u32 i = 0; i < MASQ_CANDIDATES && i < candidates; i++) {
		masq_set_candidate(i);
		flows->key = args->key;
		if (flow_access(args->read_only ? FLOW_READ : FLOW_SENT) &&
		    flow_is_same(&flows->flow, &args->flow))
			return true;
	}
	return false;
}

enum masq_result {
	MASQ_TAKEN,
	MASQ_ALLOCATED,
	MASQ_ENDED, /* taken by a connection that has ended */
};

/* Which ports that are not free an allocation may take. */
enum masq_reuse {
	REUSE_NONE,
	REUSE_OWN, /* of an ended flow of the container itself */
	REUSE_ANY, /* of any ended flow */
};

static __always_inline bool masq_is_own(const struct flow *flow, const struct flow *of)
{
	return flow->owner == of->owner && addr_equal(&flow->nat_addr, &of->nat_addr);
}

/*
 * Reports whether the flow is an answered UDP question, or a stream, which can continue on
 * another port.
 */
static __always_inline bool masq_is_answered(const struct flow *flow)
{
	return flow->flags & FLOW_REPLIED &&
	       (flow->state == FLOW_UDP || flow->state == FLOW_UDP_STREAM);
}

/*
 * Reports whether the flow has ended; for a flow of the same container as of, whether it
 * probably has.
 */
static __always_inline bool masq_has_ended(const struct flow *flow, const struct flow *of)
{
	if (flow_ended(flow))
		return true;
	return masq_is_own(flow, of) &&
	       (flow->flags & FLOW_RST_UNKNOWN || masq_is_answered(flow) ||
		(flow->flags & FLOW_FIN && flow->flags & FLOW_FIN_UNACKED));
}

/*
 * Reports whether the ended flow yields its port. An answer may arrive twice. Only a flow of one question and one answer yields
 * at once: it is not in the forwarding cache.
 */
static __always_inline bool masq_yields(const struct flow *flow, const struct flow *to,
					enum masq_reuse reuse)
{
	bool idle = (__s32)(now_ticks() - flow->last_seen) >= 2;

	if (reuse == REUSE_NONE || !masq_is_own(flow, to))
		return reuse == REUSE_ANY;
	if (flow->state == FLOW_UDP)
		return idle || (reuse == REUSE_ANY && !(flow->flags & FLOW_CONTINUES));
	if (flow->state == FLOW_UDP_STREAM)
		return idle && reuse == REUSE_ANY;
	return true;
}

/* Allocates the port in the key to the flow; reuse says which ended flows may lose it. */
__noinline int masq_insert(struct __sk_buff *skb, __u32 reuse)
{
	struct masq_args *args = masq_scratch_get();
	struct flow_args *flows = flow_scratch_get();
	const struct flow_key *key;
	const struct flow *flow;
	struct flow *other;

	if (!args || !flows)
		return MASQ_TAKEN;
	key = &args->key;
	flow = &args->flow;
	flows->key = *key;
	other = flow_lookup(flows);
	if (other && !flow_is_same(other, flow) && !flow_expired(other) &&
	    flow_owner_is_alive(key, other)) {
		if (!masq_has_ended(other, flow))
			return MASQ_TAKEN;
		if (!masq_yields(other, flow, reuse))
			return MASQ_ENDED;
	}
	if (masq_port_in_use(skb, key, args->ipv6))
		return MASQ_TAKEN;
	flows->new = *flow;
	if (flow_insert())
		return MASQ_ALLOCATED;
	/*
	 * The bucket is full, or another CPU was faster, with a packet of the same flow or of another
	 * one.
	 */
	other = flow_lookup(flows);
	return other && flow_is_same(other, flow) ? MASQ_ALLOCATED : MASQ_TAKEN;
}

/* Allocates candidate i to the flow. */
static __always_inline int masq_try_candidate(struct __sk_buff *skb, __u32 i, __u32 reuse)
{
	masq_set_candidate(i);
	return masq_insert(skb, reuse);
}

/*
 * Allocates the first free candidate to the flow, which has no entry; else the first of an
 * ended flow. After MASQ_FREE_PROBES candidates, ports of the container's own ended flows
 * are reused, to keep searches short. Not for ICMP errors: they open no flow.
 */
static __noinline bool masq_alloc_port(struct __sk_buff *skb)
{
	struct masq_args *args = masq_scratch_get();
	struct packet *p = pkt_scratch_get();

	if (!args || !p)
		return false;
	args->ended = MASQ_CANDIDATES;
	flow_open(&args->flow, p, FROM_CONTAINER, now_ticks());
	for (__u32 i = 0; i < MASQ_CANDIDATES; i++) {
		int result;

		if (i && !args->has_ports)
			break;
		args->flow.probe = i;
		/* Before the flow exists, because other CPUs may search for it. */
		if (i == 1 || i == MASQ_NEAR)
			moved_record_flow(&args->key, &args->flow, now_ticks());
		result = masq_try_candidate(skb, i, i < MASQ_FREE_PROBES ? REUSE_NONE : REUSE_OWN);
		if (result == MASQ_ALLOCATED)
			return true;
		if (result == MASQ_ENDED && args->ended == MASQ_CANDIDATES)
			args->ended = i;
	}
	/* Another CPU may take the first one meanwhile. */
	for (__u32 i = args->ended; i < MASQ_CANDIDATES; i++) {
		args->flow.probe = i;
		if (masq_try_candidate(skb, i, REUSE_ANY) == MASQ_ALLOCATED)
			return true;
	}
	return false;
}

/*
 * Finds the flow at its known port, or creates it there; with port 0, finds it at any port. Returns false if that is
 * impossible.
 */
__noinline int masq_keep_port(struct __sk_buff *skb, __u32 port)
{
	struct masq_args *args = masq_scratch_get();
	struct flow_args *flows = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct flow *flow;

	if (!args || !flows || !p)
		return false;
	if (!port)
		return masq_find();
	args->key.local_port = port;
	flows->key = args->key;
	flow = flow_lookup(flows);
	if (flow && flow_is_same(flow, &args->flow)) {
		flow_track(FROM_CONTAINER);
		return true;
	}
	if (p->icmp_error || p->tcp_rst) /* opens no flow */
		return false;
	flow_open(&args->flow, p, FROM_CONTAINER, now_ticks());
	return masq_insert(skb, REUSE_NONE) == MASQ_ALLOCATED;
}

/*
 * Records the source as the latest of its uplink. Reports whether the uplink has had another one.
 */
static __noinline bool masq_record_source(struct __sk_buff *skb, const struct addr *source,
					  bool ipv6)
{
	struct masq_sources_key key = {.ifindex = skb->ifindex, .ipv6 = ipv6};
	struct masq_sources *sources = bpf_map_lookup_elem(&masq_sources, &key);
	struct masq_args *args = masq_scratch_get();
	bool moved = false;

	if (!args)
		return false;
	if (!sources) {
		__builtin_memset(&args->sources, 0, sizeof(args->sources));
		args->sources.addr[0] = *source;
		bpf_map_update_elem(&masq_sources, &key, &args->sources, BPF_NOEXIST);
		return false;
	}
	if (addr_equal(&sources->addr[0], source))
		return !addr_is_any(&sources->addr[1], true);
	args->sources = *sources;
	sources->addr[0] = *source;
	for (int i = 1; i < MASQ_SOURCES; i++) {
		moved |= addr_equal(&args->sources.addr[i - 1], source);
		if (!moved)
			sources->addr[i] = args->sources.addr[i - 1];
	}
	return true;
}

/*
 * Sets source to what fib_source returns for p, and records it. Returns false if there is none. For
 * masq_find_former, masq_scratch gets whether the uplink has had another one.
 */
static __noinline bool masq_source(struct __sk_buff *skb, const struct packet *p,
				   struct addr *source)
{
	struct masq_args *args = masq_scratch_get();
	const struct fwd_key *key = route_key(ROUTE_SOURCE, p, skb->ifindex);
	struct fwd_entry *entry;

	if (!args || !key)
		return false;
	entry = route_lookup(key);
	if (entry) {
		*source = entry->nat_addr;
		args->has_former = entry->budget;
		return true;
	}
	if (!fib_source(skb, packet_tuple(p), skb->ifindex, source))
		return false;
	args->has_former = masq_record_source(skb, source, p->ipv6);
	entry = route_store(p, key, args->has_former);
	if (entry)
		entry->nat_addr = *source;
	return true;
}

/*
 * Finds the flow under a former source of its uplink that is still an address of the
 * host. So connections survive a new preferred address.
 */
__noinline int masq_find_former(struct __sk_buff *skb)
{
	struct masq_args *args = masq_scratch_get();
	struct masq_sources_key key = {.ifindex = skb->ifindex};
	struct packet *p = pkt_scratch_get();
	struct masq_sources *sources;
	struct addr present;

	if (!args || !p || packet_opens(p) || !args->has_ports || !args->has_former)
		return false;
	key.ipv6 = args->ipv6;
	sources = bpf_map_lookup_elem(&masq_sources, &key);
	if (!sources)
		return false;
	present = args->key.local;
	for (int i = 0; i < MASQ_SOURCES; i++) {
		args->key.local = sources->addr[i];
		if (addr_is_any(&args->key.local, true))
			break;
		if (!addr_equal(&args->key.local, &present) && masq_find() &&
		    fib_is_local_addr(skb, &args->key.local, args->ipv6))
			return true;
	}
	args->key.local = present;
	return false;
}

/*
 * Reports whether a container's flow that was never replied to, or has expired, loses its
 * port to a new host port or socket of the host. One of this tick has just been found free.
 */
static __always_inline bool masq_loses(struct __sk_buff *skb, const struct packet *p,
				       const struct flow_key *key, const struct flow *flow)
{
	if (flow->flags & FLOW_REPLIED && !flow_expired(flow))
		return false;
	if (flow->created == (__u16)now_ticks())
		return false;
	return !p->tcp_synack && !p->tcp_rst && masq_port_in_use(skb, key, p->ipv6);
}

/*
 * Returns the masqueraded flow with the tuple of p, from the outside or a container; or NULL. If p opens a connection, it is no
 * reply, but the tuple is in use. The copy predates p's update.
 */
static __noinline struct flow *masq_lookup_reply(struct __sk_buff *skb, const struct packet *p,
						 enum flow_access access)
{
	struct flow_args *args = flow_scratch_get();
	struct flow *flow;

	if (!args || !port_may_be_ours(p, p->dport))
		return NULL;
	flow_received_key(&args->key, packet_tuple(p), FLOW_SNAT);
	flow = &args->flow;
	if (!flow_access(access))
		return NULL;
	if (flow->owner == OWNER_HOST ? flow_expired(flow) : masq_loses(skb, p, &args->key, flow))
		return NULL;
	return flow;
}
