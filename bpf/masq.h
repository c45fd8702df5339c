/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Masquerading with a single entry per flow: (remote, our address, allocated port)
 * gives the container's address and port, and translates replies. Outbound packets
 * find their port by probing a fixed sequence of candidates, computed from their
 * own tuple. So no second entry can be lost alone, and a flow whose entry was
 * evicted gets the same port again.
 *
 * The functions take the flow from masq_scratch, and set its port there. Those that
 * the verifier checks on their own, and not for each caller, are global.
 */
#pragma once

#include "endpoint.h"
#include "fib.h"
#include "flow.h"
#include "masq_port.h"
#include "socket.h"

#define MASQ_FREE_PROBES 4 /* then ports of the container's own ended flows are reused */

/* Reports whether packets of the endpoint to p's destination keep their source. */
static __always_inline bool masq_skips(const struct endpoint *endpoint, const struct packet *p)
{
	struct prefix_key key = {
		.prefixlen = 32 + 128,
		.set = endpoint->nonmasq_set,
		.addr = p->dst,
	};

	if (!(endpoint->flags & ENDPOINT_MASQ) || addr_is_link_scoped(&p->dst, p->ipv6))
		return true;
	return endpoint->nonmasq_set && bpf_map_lookup_elem(&nonmasq_cidrs, &key);
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

/* The probes of the flow's group. NULL only for the verifier. */
static __always_inline struct masq_probes *masq_probes_lookup(const struct masq_args *args)
{
	__u32 group = masq_probes_group(&args->key, &args->flow);

	return bpf_map_lookup_elem(&masq_probes, &group);
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
 * Reports whether no flow has candidate i or a later one. step is the number of steps before. A
 * protocol without ports, and SCTP, have one candidate: one container at a time can use it with a
 * remote, or a port of SCTP.
 */
static __always_inline bool masq_search_ends(const struct masq_args *args,
					     const struct masq_probes *probes, __u32 i, __u32 *step,
					     __u32 since)
{
	if (i != 1U << *step)
		return false;
	return !args->has_ports || probes->seen[(*step)++] < since ||
	       (i == 1 && !moved_since(moved_sides(&args->key.remote, &args->flow.nat_addr),
				       args->flow.nat_port, since));
}

/*
 * Finds the entry of the flow of the packet in pkt_scratch. It searches all candidates that the
 * flow may have, because earlier ones may have become free.
 */
__noinline int masq_find(struct __sk_buff *skb)
{
	struct masq_args *args = masq_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct masq_probes *probes;
	struct flow *flow;
	__u32 since, step = 0;

	USE_ARGUMENT(skb);
	if (!args || !p)
		return false;
	probes = masq_probes_lookup(args);
	if (!probes)
		return false;
	since = masq_probes_now() - masq_idle_time(args, p);
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		if (masq_search_ends(args, probes, i, &step, since))
			break;
		masq_set_candidate(i);
		flow = bpf_map_lookup_elem(&flows, &args->key);
		if (flow && masq_is_same(flow, &args->flow)) {
			if (!args->read_only)
				flow_touch(&args->key, flow, p, FROM_CONTAINER);
			return true;
		}
	}
	return false;
}

__noinline int masq_recover_candidate(struct __sk_buff *skb, __u32 i)
{
	struct masq_args *args = masq_scratch_get();
	struct flow *flow;

	USE_ARGUMENT(skb);
	if (!args)
		return false;
	masq_set_candidate(i);
	flow = flow_recover(&args->key);
	return flow && masq_is_same(flow, &args->flow);
}

/*
 * Restores the evicted entry of the flow in masq_scratch from its copy. Reports whether there
 * is one.
 */
__noinline int masq_recover(struct __sk_buff *skb)
{
	struct masq_args *args = masq_scratch_get();
	struct packet *p = pkt_scratch_get();
	__u32 since, group, step = 0;
	struct masq_probes *probes;

	if (!args || !p || packet_opens(p) || !is_tcp_or_udp(args->key.protocol))
		return false;
	group = masq_probes_group(&args->key, &args->flow);
	probes = bpf_map_lookup_elem(&backup_probes, &group);
	if (!probes)
		return false;
	since = masq_probes_now() - masq_idle_time(args, p);
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		if (masq_search_ends(args, probes, i, &step, since))
			break;
		if (masq_recover_candidate(skb, i))
			return true;
		args->recovered = i + 1;
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

/* Reports whether the ended flow leaves its port to the other one. An answer may arrive twice. */
static __always_inline bool masq_yields(const struct flow *flow, const struct flow *to,
					enum masq_reuse reuse)
{
	bool idle = (__s32)(now_ticks() - flow->last_seen) >= 2;

	if (reuse == REUSE_NONE || !masq_is_own(flow, to))
		return reuse == REUSE_ANY;
	if (flow->state == FLOW_UDP)
		return idle || reuse == REUSE_ANY;
	if (flow->state == FLOW_UDP_STREAM)
		return idle && reuse == REUSE_ANY;
	return true;
}

/* Allocates the port in the key to the flow; reuse says which ended flows may lose it. */
__noinline int masq_insert(struct __sk_buff *skb, __u32 reuse)
{
	struct masq_args *args = masq_scratch_get();
	const struct flow_key *key;
	const struct flow *flow;
	struct flow *other;

	if (!args)
		return MASQ_TAKEN;
	key = &args->key;
	flow = &args->flow;
	other = bpf_map_lookup_elem(&flows, key);
	if (!other && flow->probe >= args->recovered)
		other = flow_recover(key);
	if (other && !masq_is_same(other, flow) && !flow_expired(other) &&
	    flow_owner_is_alive(key, other)) {
		if (!masq_has_ended(other, flow))
			return MASQ_TAKEN;
		if (!masq_yields(other, flow, reuse))
			return MASQ_ENDED;
	}
	if (masq_port_in_use(skb, key, args->ipv6))
		return MASQ_TAKEN;
	if (other)
		flow_remove(key);
	if (!bpf_map_update_elem(&flows, key, flow, BPF_NOEXIST))
		return MASQ_ALLOCATED;
	/* Another CPU was faster, with a packet of the same flow or of another one. */
	other = bpf_map_lookup_elem(&flows, key);
	return other && masq_is_same(other, flow) ? MASQ_ALLOCATED : MASQ_TAKEN;
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
	__u32 step = 0;

	if (!args || !p)
		return false;
	args->ended = MASQ_PROBES;
	flow_open(&args->flow, p, FROM_CONTAINER);
	for (__u32 i = 0; i < MASQ_PROBES; i++) {
		int result;

		if (i && !args->has_ports)
			break;
		args->flow.probe = i;
		if (i ==
		    1U << step) { /* before the flow exists, because other CPUs may search for it */
			masq_probes_record_flow(&args->key, &args->flow, false);
			step++;
		}
		result = masq_try_candidate(skb, i, i < MASQ_FREE_PROBES ? REUSE_NONE : REUSE_OWN);
		if (result == MASQ_ALLOCATED)
			return true;
		if (result == MASQ_ENDED && args->ended == MASQ_PROBES)
			args->ended = i;
	}
	/* Another CPU may take the first one meanwhile. */
	for (__u32 i = args->ended; i < MASQ_PROBES; i++) {
		args->flow.probe = i;
		if (masq_try_candidate(skb, i, REUSE_ANY) == MASQ_ALLOCATED)
			return true;
	}
	return false;
}

/*
 * Finds the flow at its known port, or restores its entry there; 0: any port. Returns
 * false if that is impossible.
 */
__noinline int masq_keep_port(struct __sk_buff *skb, __u32 port)
{
	struct masq_args *args = masq_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct flow *flow;

	if (!args || !p)
		return false;
	if (!port)
		return masq_find(skb);
	args->key.local_port = port;
	flow = bpf_map_lookup_elem(&flows, &args->key) ?: flow_recover(&args->key);
	if (flow && masq_is_same(flow, &args->flow)) {
		flow_touch(&args->key, flow, p, FROM_CONTAINER);
		return true;
	}
	if (p->icmp_error || p->tcp_rst) /* opens no flow */
		return false;
	flow_open(&args->flow, p, FROM_CONTAINER);
	return masq_insert(skb, REUSE_NONE) == MASQ_ALLOCATED;
}

/* Records the flow's source as the latest of its uplink. */
static __noinline void masq_record_source(struct __sk_buff *skb, struct masq_args *args)
{
	struct masq_sources_key key = {.ifindex = skb->ifindex, .ipv6 = args->ipv6};
	struct masq_sources *sources = bpf_map_lookup_elem(&masq_sources, &key);
	bool moved = false;

	if (!sources) {
		__builtin_memset(&args->sources, 0, sizeof(args->sources));
		args->sources.addr[0] = args->key.local;
		bpf_map_update_elem(&masq_sources, &key, &args->sources, BPF_NOEXIST);
		return;
	}
	if (addr_equal(&sources->addr[0], &args->key.local))
		return;
	args->sources = *sources;
	sources->addr[0] = args->key.local;
	for (int i = 1; i < MASQ_SOURCES; i++) {
		moved |= addr_equal(&args->sources.addr[i - 1], &args->key.local);
		if (!moved)
			sources->addr[i] = args->sources.addr[i - 1];
	}
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
	__u32 recovered;

	if (!args || !p || packet_opens(p) || !args->has_ports)
		return false;
	key.ipv6 = args->ipv6;
	sources = bpf_map_lookup_elem(&masq_sources, &key);
	if (!sources)
		return false;
	present = args->key.local;
	recovered = args->recovered;
	for (int i = 0; i < MASQ_SOURCES; i++) {
		args->key.local = sources->addr[i];
		if (addr_is_any(&args->key.local, true))
			break;
		if (!addr_equal(&args->key.local, &present) &&
		    (masq_find(skb) || masq_recover(skb)) &&
		    fib_is_local_addr(skb, &args->key.local, args->ipv6))
			return true;
	}
	args->key.local = present;
	args->recovered = recovered;
	return false;
}

/*
 * Reports whether a container's flow that was never replied to, or has expired, loses its
 * port to a new host port or socket of the host.
 */
static __always_inline bool masq_loses(struct __sk_buff *skb, const struct packet *p,
				       const struct flow_key *key, const struct flow *flow)
{
	if (flow->flags & FLOW_REPLIED && !flow_expired(flow))
		return false;
	return !p->tcp_synack && !p->tcp_rst && masq_port_in_use(skb, key, p->ipv6);
}

/*
 * Returns the masqueraded flow with the tuple of p, from the outside or a container; or NULL.
 * If p opens a connection, it is not a reply, but its tuple is in use.
 */
static __noinline struct flow *masq_lookup_reply(struct __sk_buff *skb, const struct packet *p,
						 struct flow_key *key)
{
	struct flow *flow;

	flow_received_key(key, p, FLOW_SNAT);
	if (!port_may_be_ours(p, p->dport))
		return NULL;
	flow = bpf_map_lookup_elem(&flows, key) ?: flow_recover(key);
	if (!flow)
		return NULL;
	if (flow->owner == OWNER_HOST ? flow_expired(flow) : masq_loses(skb, p, key, flow))
		return NULL;
	return flow;
}
