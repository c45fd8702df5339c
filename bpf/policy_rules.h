/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Rule sets: whether one direction of a container admits a connection with a peer. All rules admit, so
 * the order of the lookups does not matter, and a rule set admits the union of its rules.
 */
#pragma once

#include "addr.h"
#include "maps.h"
#include "packet.h"
#include "scratch.h"

/* The container, and a connection with a peer: the arguments of policy_verdict. */
struct policy_args {
	__u64 owner;
	__u64 container;
	__u64 rule_sets; /* as in struct policy */
	__u32 generation;

	__u32 rule_set; /* the reference that decides */
	struct addr peer;
	__u32 network;	     /* of the peer, if it is a container of this host */
	enum peer_kind kind; /* PEER_NETWORK or PEER_OUTSIDE */
	bool host;	     /* the peer is the container's own node */
	__u8 protocol;
	__u16 port; /* the destination's, in the direction in which the connection is opened */
};

SCRATCH(policy_scratch, struct policy_args);

#define RULE_SET_INGRESS(rule_sets) ((__u32)(rule_sets))
#define RULE_SET_EGRESS(rule_sets)  ((__u32)((rule_sets) >> 32))

/* Returns the checks that a packet needs: enum policy_checks. */
static __always_inline __u32 policy_checks(void)
{
	__u32 host = 0;
	struct policy *policy = bpf_map_lookup_elem(&policies, &host);

	return policy ? policy->checks : 0;
}

/* Returns the generation of the policy with the index. */
static __always_inline __u32 policy_generation(__u32 index)
{
	struct policy *policy = bpf_map_lookup_elem(&policies, &index);

	return policy ? *(volatile __u32 *)&policy->generation : 0;
}

/* Reports whether no policy that has admitted the entry's packets has revoked anything since. */
static __always_inline bool policy_entry_is_current(const struct fwd_entry *entry)
{
	__u32 policies = entry->policies, sum;

	if (!policies)
		return true;
	sum = policy_generation(policies & 0xffff);
	if (policies >> 16)
		sum += policy_generation(policies >> 16);
	return (__u16)sum == entry->policy_generation;
}

/*
 * Loads the policy of the container behind device, and records in p that the decision depends on it.
 * The generation is read first: a decision by older rules has an older one.
 */
static __always_inline bool policy_load(struct policy_args *args, const struct device *device,
					struct packet *p)
{
	__u32 index = device->policy;
	struct policy *policy = bpf_map_lookup_elem(&policies, &index);

	if (!policy)
		return false;
	args->owner = device->owner;
	args->container = device->container;
	args->generation = *(volatile __u32 *)&policy->generation;
	args->rule_sets = *(volatile __u64 *)&policy->rule_sets;
	if ((__u16)p->decided.policies != index && p->decided.policies >> 16 != index) {
		p->decided.policies = p->decided.policies << 16 | index;
		p->decided.policy_generation += args->generation;
	}
	return true;
}

/* Reports whether the rule set has a rule for the peer that admits the connection. */
static __always_inline bool rule_admits(const struct policy_args *args, enum peer_kind kind,
					__u32 peer)
{
	struct rule_key key = {
		.prefixlen = RULE_ONE_PORT,
		.set = args->rule_set >> RULE_SET_SHIFT,
		.peer = peer,
		.kind = kind,
		.protocol = args->protocol,
		.port = {args->port >> 8, args->port},
	};

	return args->rule_set & 1 << kind && bpf_map_lookup_elem(&policy_rules, &key);
}

/* Reports whether the rule set has a rule for a block with the peer's address. */
static __always_inline bool rule_admits_block(const struct policy_args *args)
{
	const __u32 *block;

	if (!(args->rule_set & 1 << PEER_BLOCK))
		return false;
	block = prefix_lookup(&policy_blocks, args->rule_set >> RULE_SET_SHIFT, &args->peer);
	return block && rule_admits(args, PEER_BLOCK, *block);
}

/* Reports whether the rule set has a rule for the class of the peer's address. */
static __always_inline bool rule_admits_class(const struct policy_args *args)
{
	const __u32 *class;

	if (!(args->rule_set & 1 << PEER_CLASS))
		return false;
	class = bpf_map_lookup_elem(&peer_classes, &args->peer);
	return class && rule_admits(args, PEER_CLASS, *class);
}

/* Reports whether the rule set in policy_scratch admits the connection there. */
__noinline int policy_verdict(void)
{
	struct policy_args *args = policy_scratch_get();

	if (!args)
		return false;
	if (!args->rule_set || (args->host && args->rule_set & RULE_SET_HOST) ||
	    rule_admits_block(args))
		return true;
	if (args->host)
		return false;
	if (rule_admits(args, PEER_ANY, 0) || rule_admits_class(args))
		return true;
	return rule_admits(args, args->kind, args->kind == PEER_NETWORK ? args->network : 0);
}
