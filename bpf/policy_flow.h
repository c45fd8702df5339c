/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flows that a container's rules have admitted. They admit replies, spare the rules for the connection's next
 * packets, and show what is revoked (policy_reset.h). A flow has the peer as the rules have seen it, after the
 * host's translation, and the generation of the policy. Under another generation, the rules judge it again.
 *
 * from_container does not know that peer, so the last hook creates the flow, and only if no other flow admits replies: what is
 * masqueraded has its FLOW_SNAT, two containers have their FLOW_PAIR. A flow that from_container makes, because no last hook may see
 * the packet, is not confirmed: it admits replies, but the last hook judges what the container sends.
 */
#pragma once

#include "conntrack.h"
#include "flow_table.h"
#include "policy_rules.h"

/* Sets the peer in args: a container in the network, or PEER_OUTSIDE. */
static __always_inline void policy_set_known(struct policy_args *args, const struct addr *addr,
					     enum peer_kind kind, __u32 network)
{
	args->peer = *addr;
	args->host = false;
	args->kind = kind;
	args->network = network;
}

/*
 * Sets the peer in args by its address. Returns false if it is the container itself, which is always
 * admitted.
 */
static __always_inline bool policy_set_peer(struct policy_args *args, const struct addr *addr)
{
	struct endpoint *endpoint = endpoint_lookup(addr);

	policy_set_known(args, addr, endpoint ? PEER_NETWORK : PEER_OUTSIDE,
			 endpoint ? endpoint->network : 0);
	return !endpoint || endpoint->container != args->container;
}

/* Reports whether the rules of the policy in args admit a flow that is to be judged again. */
static __always_inline bool policy_admits_flow(struct policy_args *args, const struct flow_key *key,
					       const struct flow *flow)
{
	bool egress = !(flow->flags & FLOW_BY_REMOTE);

	args->rule_set =
		egress ? RULE_SET_EGRESS(args->rule_sets) : RULE_SET_INGRESS(args->rule_sets);
	args->protocol = key->protocol;
	args->port = egress ? flow->nat_port : key->local_port;
	if (!policy_set_peer(args, &flow->nat_addr))
		return true;
	args->host = !!(flow->reset & FLOW_PEER_HOST);
	return policy_verdict();
}

/*
 * Sets args->new to the flow with the key in args, if the connection is older than the container's rules (AdmitReplies in
 * maps/flows.go).
 */
static __always_inline bool policy_find_older(const struct policy_args *policy,
					      struct flow_args *args)
{
	const struct admitted_flow *older = bpf_map_lookup_elem(&admitted_flows, &args->key);

	if (!older || older->owner != policy->owner)
		return false;
	__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.state = args->key.protocol == IPPROTO_UDP ? FLOW_UDP_STREAM : FLOW_ESTABLISHED;
	args->new.flags = older->flags | FLOW_REPLIED;
	args->new.last_seen = older->last_seen;
	args->new.created = older->last_seen;
	return true;
}

static __always_inline void policy_swap_sides(struct flow_key *key)
{
	struct addr remote = key->remote;
	__u16 port = key->remote_port;

	key->remote = key->local;
	key->remote_port = key->local_port;
	key->local = remote;
	key->local_port = port;
}

/* The same if the connection has a FLOW_PAIR. */
static __always_inline bool policy_find_pair(const struct policy_args *policy,
					     struct flow_args *args)
{
	const struct flow *flow = &args->flow;
	struct flow_key *key = &args->key;
	bool found, swapped;

	if (!is_tcp_or_udp(key->protocol) || !endpoint_lookup(&key->remote))
		return false;
	swapped = offload_is_first(&key->local, key->local_port, &key->remote, key->remote_port);
	if (swapped)
		policy_swap_sides(key);
	key->kind = FLOW_PAIR;
	found = flow_access(FLOW_READ) &&
		(flow->owner == policy->owner || flow->payer == policy->owner);
	if (found) {
		args->new = *flow;
		args->new.flags &= ~FLOW_BY_REMOTE;
		if (flow->payer != policy->owner)
			args->new.flags |= FLOW_BY_REMOTE;
	}
	if (swapped)
		policy_swap_sides(key);
	key->kind = FLOW_POLICY;
	flow_access(FLOW_READ); /* there is none, but its place may be free */
	return found;
}

/* Sets the peer of p's flow, which its container has opened, if it is known how the host's rules translate p. */
static __always_inline bool policy_set_backend(struct flow *flow, const struct packet *p)
{
	const struct ct_translation *t = ct_scratch_get();

	if (!t || !p->decided.ct_nat)
		return false;
	flow->nat_addr = t->reply ? t->in.src : t->out.dst;
	flow->nat_port = t->reply ? t->in.sport : t->out.dport;
	return true;
}

/* Records that the rules no longer admit the connection of the TCP segment in pkt_scratch, which has the flow. */
static __always_inline void policy_revoke(const struct flow *flow)
{
	struct packet *p = pkt_scratch_get();

	if (p && p->tcp_ack && !p->tcp_synack && !p->tcp_rst)
		p->decided.revoked =
			flow->flags & FLOW_BY_REMOTE ? REASON_POLICY_INGRESS : REASON_POLICY_EGRESS;
}

/*
 * Reports whether the rules of the policy in args admit the flow of another generation there, which
 * sender's packet has. The opener's packets show the peer better than the flow does. So does the last hook if the
 * stack translates the container's packets, and the flow may have the address from before.
 */
static __always_inline bool policy_admits_again(struct policy_args *policy,
						const struct flow_args *args,
						const struct packet *p, __u32 sender)
{
	const struct flow *flow = &args->flow;
	bool by_remote = flow->flags & FLOW_BY_REMOTE, sent = sender == FROM_CONTAINER;
	bool exact = by_remote || !addr_equal(&flow->nat_addr, &args->key.remote) ||
		     !(sent || p->decided.changed);

	if (sent != by_remote && (by_remote || !exact))
		return false;
	if (policy_admits_flow(policy, &args->key, flow))
		return sent == by_remote;
	if (exact)
		policy_revoke(flow);
	return false;
}

/*
 * Has the last hook judge p, although a flow of its sender admits it, unless the flow has p's peer after translation. That peer
 * may change: for datagrams at any time, for TCP once conntrack has forgotten the connection.
 */
static __always_inline void policy_await(struct packet *p, const struct policy_args *policy,
					 const struct flow_key *key, const struct flow *flow)
{
	if (flow->flags & FLOW_BY_REMOTE || !RULE_SET_EGRESS(policy->rule_sets))
		return;
	if (flow->reset & FLOW_UNCONFIRMED || flow->nat_port != key->remote_port ||
	    !addr_equal(&flow->nat_addr, &key->remote))
		p->decided.pending = PENDING_JUDGE;
	else if (p->protocol != IPPROTO_TCP)
		p->decided.pending =
			endpoint_lookup(&key->remote) ? PENDING_JUDGE : PENDING_COMPARE;
}

/*
 * Creates the flow with the key in flow_scratch, which flow_access has not found, if the connection has been
 * admitted otherwise. Reports whether it has, and the rules admit it.
 */
static __always_inline bool policy_admit_known(struct policy_args *policy, struct flow_args *args,
					       struct packet *p, __u32 sender)
{
	bool older = policy_find_older(policy, args);

	if (!older && !policy_find_pair(policy, args))
		return false;
	args->new.owner = policy->owner;
	args->new.nat_addr = args->key.remote;
	args->new.nat_port = args->key.remote_port;
	args->new.reset = 0;
	if (!(args->new.flags &FLOW_BY_REMOTE)) {
		if (!policy_set_backend(&args->new, p) && RULE_SET_EGRESS(policy->rule_sets))
			args->new.reset = FLOW_UNCONFIRMED;
		if (sender == FROM_CONTAINER)
			policy_await(p, policy, &args->key, &args->new);
	}
	args->new.policy_generation = policy->generation;
	if (flow_expired(&args->new))
		return false;
	if (!policy_admits_flow(policy, &args->key, &args->new)) {
		if (!older) /* that one's peer may be the host, or not be translated yet */
			policy_revoke(&args->new);
		return false;
	}
	if (!older) /* the packets that from_container compares update the FLOW_PAIR */
		return true;
	args->new.last_seen = now_ticks();
	if (flow_insert())
		bpf_map_delete_elem(&admitted_flows, &args->key);
	return true;
}

/* Reports whether the container in args has a flow of the packet in pkt_scratch, with the key in flow_scratch. */
static __always_inline bool policy_has_flow(const struct policy_args *policy)
{
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();

	return args && p && flow_access(FLOW_READ) && !packet_opens(p) &&
	       args->flow.owner == policy->owner &&
	       args->flow.policy_generation == policy->generation && !flow_expired(&args->flow);
}

/* The key for p, whose destination is the container's, perhaps only after translation. */
static __always_inline void policy_received_key(struct flow_key *key, const struct packet *p)
{
	flow_received_key(key, packet_tuple(p), FLOW_POLICY);
	key->local = p->decided.new_addr;
	key->local_port = p->decided.new_port;
}

/*
 * Reports whether the packet in pkt_scratch belongs to a flow that the rules have admitted, and tracks it. The policy and
 * the key are in scratch memory. A packet that opens a connection belongs to none, because a former one may have
 * had its tuple, nor does an echo request with the identifier 0, because the other side's has the same key.
 */
__noinline int policy_is_known(__u32 sender)
{
	struct policy_args *policy = policy_scratch_get();
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct flow *flow;

	if (!policy || !args || !p)
		return false;
	flow = &args->flow;
	if (packet_opens(p) || (p->has_ports && !(p->sport || p->dport || p->echo_reply))) {
		flow_access(FLOW_READ);
		return false;
	}
	args->new.owner = policy->owner;
	args->new.policy_generation = policy->generation;
	flow_access(sender == FROM_CONTAINER ? FLOW_SENT : FLOW_RECEIVED);
	if (!args->tracked) {
		if (args->way >= FLOW_WAYS || flow->owner != policy->owner || flow_expired(flow))
			return policy_admit_known(policy, args, p, sender);
		if (flow->policy_generation != policy->generation &&
		    !policy_admits_again(policy, args, p, sender))
			return false;
		flow_track(sender);
	}
	if (sender == FROM_CONTAINER)
		policy_await(p, policy, &args->key, flow);
	return true;
}

/* Reports whether p's connection is older than the rules, and the other side has opened it. */
static __always_inline bool policy_is_older_reply(const struct policy_args *policy,
						  const struct flow_args *args,
						  const struct packet *p, __u8 opener)
{
	const struct admitted_flow *older;

	if (packet_opens(p))
		return false;
	older = bpf_map_lookup_elem(&admitted_flows, &args->key);
	return older && older->owner == policy->owner && older->flags != opener;
}

/*
 * Tracks the packet in pkt_scratch, which opens or continues a connection that the rules admit now, with the peer in
 * policy_scratch: updates the flow that policy_is_known has found, or creates it. A connection must begin with its SYN
 * or INIT: another packet may belong to one that the other side has opened. payer as in struct flow.
 */
__noinline int policy_track(__u32 sender, __u64 payer)
{
	__u8 opener = sender == FROM_REMOTE ? FLOW_BY_REMOTE : 0;
	const struct policy_args *policy = policy_scratch_get();
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	const struct flow *flow;
	bool known;

	if (!policy || !args || !p || p->icmp_error || p->decided.ct_update)
		return 0;
	flow = &args->flow;
	known = args->way < FLOW_WAYS && flow->owner == policy->owner && !flow_expired(flow);
	if (known && (flow->flags & FLOW_BY_REMOTE) != opener) {
		if (!packet_opens(p))
			return 0; /* a reply of a flow that is revoked */
		known = false;
	}
	if (!known && (!packet_may_open(p) || p->echo_reply ||
		       policy_is_older_reply(policy, args, p, opener)))
		return 0;
	if (known)
		args->new = *flow;
	else
		__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.owner = policy->owner;
	args->new.payer = payer;
	args->new.nat_addr = policy->peer;
	args->new.nat_port = sender == FROM_CONTAINER ? p->dport : p->sport;
	args->new.policy_generation = policy->generation;
	args->new.reset = policy->host ? FLOW_PEER_HOST : 0;
	if (sender == FROM_CONTAINER && p->decided.pending && RULE_SET_EGRESS(policy->rule_sets))
		args->new.reset |= FLOW_UNCONFIRMED;
	if (!known) {
		args->new.flags = opener;
		flow_open(&args->new, p, sender, now_ticks());
	}
	if (!flow_insert() || !known)
		return 0;
	args->flow = args->new;
	flow_track(sender);
	return 0;
}
