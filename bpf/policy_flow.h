/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Flows by which policies admit replies. A container whose ingress is isolated has one of kind
 * FLOW_EGRESS for each connection that it opens, one whose egress is isolated has one of kind
 * FLOW_INGRESS for each connection that it accepts. The flow has the peer as the rules have seen it,
 * after the host's translation, and the generation of the policy. Under another generation, the rules
 * judge the flow again.
 */
#pragma once

#include "flow.h"
#include "policy_rules.h"

/*
 * Sets the peer in args by its address. Returns false if it is the container itself, which is always
 * admitted.
 */
static __always_inline bool policy_set_peer(struct policy_args *args, const struct addr *addr)
{
	struct endpoint *endpoint = endpoint_lookup(addr);

	args->peer = *addr;
	args->host = false;
	args->kind = endpoint ? PEER_NETWORK : PEER_OUTSIDE;
	args->network = endpoint ? endpoint->network : 0;
	return !endpoint || endpoint->container != args->container;
}

/* Reports whether the rules of the policy in policy_scratch admit the flow in flow_scratch. */
static __always_inline bool policy_admits_flow(struct policy_args *args, const struct flow_key *key,
					       const struct flow *flow)
{
	bool egress = key->kind == FLOW_EGRESS;

	if (flow->policy_generation == args->generation)
		return true;
	args->rule_set =
		egress ? RULE_SET_EGRESS(args->rule_sets) : RULE_SET_INGRESS(args->rule_sets);
	args->protocol = key->protocol;
	args->port = egress ? flow->nat_port : key->local_port;
	return !policy_set_peer(args, egress ? &flow->nat_addr : &key->remote) || policy_verdict();
}

/*
 * Creates the flow with the key in flow_scratch, if the container has opened the connection before it
 * got its policy. Reports whether it has, and the rules admit it.
 */
static __always_inline bool policy_admit_older(struct policy_args *policy, struct flow_args *args)
{
	const struct admitted_flow *older = bpf_map_lookup_elem(&admitted_flows, &args->key);

	if (!older || older->owner != policy->owner)
		return false;
	__builtin_memset(&args->new, 0, sizeof(args->new));
	args->new.owner = policy->owner;
	args->new.state = args->key.protocol == IPPROTO_UDP ? FLOW_UDP_STREAM : FLOW_ESTABLISHED;
	args->new.flags = FLOW_REPLIED;
	args->new.last_seen = older->last_seen;
	args->new.created = older->last_seen;
	args->new.nat_addr = args->key.remote;
	args->new.nat_port = args->key.remote_port;
	args->new.policy_generation = policy->generation - 1; /* judged by policy_admits_flow */
	if (flow_expired(&args->new) || !policy_admits_flow(policy, &args->key, &args->new))
		return false;
	args->new.last_seen = now_ticks();
	if (flow_insert(true))
		bpf_map_delete_elem(&admitted_flows, &args->key);
	return true;
}

/* The key for p, received under the container's address, to which it is perhaps yet to be translated. */
static __always_inline void policy_received_key(struct flow_key *key, const struct packet *p,
						enum flow_kind kind)
{
	flow_received_key(key, p, kind);
	key->local = p->decided.new_addr;
	key->local_port = p->decided.new_port;
}

/*
 * Reports whether the packet in pkt_scratch is a reply, or an ICMP error about a connection, of a flow
 * of the kind of the container in policy_scratch. Tracks the flow.
 */
static __always_inline bool policy_is_reply(enum flow_kind kind)
{
	enum sender sender = kind == FLOW_EGRESS ? FROM_REMOTE : FROM_CONTAINER;
	struct policy_args *policy = policy_scratch_get();
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct flow *flow;

	if (!policy || !args || !p || packet_opens(p))
		return false;
	if (sender == FROM_CONTAINER)
		flow_sent_key(&args->key, p, kind);
	else
		policy_received_key(&args->key, p, kind);
	flow = flow_lookup(args);
	if (!flow || flow->owner != policy->owner || flow_expired(flow))
		return policy_admit_older(policy, args);
	if (!policy_admits_flow(policy, &args->key, flow))
		return false;
	flow_track(sender);
	return true;
}

/*
 * Updates the flow with the key in flow_scratch by the packet in pkt_scratch, whose side opens connections; or
 * creates it, so that replies are admitted. A connection must begin with its SYN or INIT: another packet may
 * belong to a connection that the other side has opened. payer as in struct flow. The peer that the rules have
 * admitted is in policy_scratch.
 */
static __always_inline void policy_track(__u64 payer)
{
	struct policy_args *policy = policy_scratch_get();
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	enum sender sender;
	struct flow *flow;
	bool known;

	if (!policy || !args || !p || p->icmp_error || p->decided.ct_update)
		return;
	sender = args->key.kind == FLOW_EGRESS ? FROM_CONTAINER : FROM_REMOTE;
	flow = flow_lookup(args);
	known = flow && flow->owner == policy->owner;
	if (!known && !packet_may_open(p))
		return;
	if (!known || flow->policy_generation != policy->generation) {
		if (known)
			args->new = *flow;
		else
			__builtin_memset(&args->new, 0, sizeof(args->new));
		args->new.owner = policy->owner;
		args->new.payer = payer;
		args->new.nat_addr = policy->peer;
		args->new.nat_port = policy->port;
		args->new.policy_generation = policy->generation;
		if (!known)
			flow_open(&args->new, p, sender, now_ticks());
		if (!flow_insert(true) || !known)
			return;
		args->flow = args->new;
	}
	flow_track(sender);
}

/* Reports whether the rules have admitted the connection that the container opens, as they are now. */
static __always_inline bool policy_is_tracked(const struct policy_args *policy,
					      struct flow_args *args)
{
	struct flow *flow = flow_lookup(args);

	return flow && flow->owner == policy->owner &&
	       flow->policy_generation == policy->generation && !flow_expired(flow);
}
