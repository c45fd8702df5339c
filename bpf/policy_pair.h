/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * FLOW_PAIR: the flow of a connection between two containers, for the rules of both. from_container finds it by one lookup, and
 * unchanged packets need no other lookup (policy_is_decided). The key is that of a FLOW_OFFLOAD. The owner is the container
 * that was called, the payer the one that has opened it. policy_generation stands for both policies.
 */
#pragma once

#include "flow_table.h"

/* Sets the key of p's connection. Reports whether p's sender is its local side. */
static __always_inline bool policy_pair_key(struct flow_key *key, const struct packet *p)
{
	bool sent = offload_key(key, packet_tuple(p), &p->dst, p->dport);

	key->kind = FLOW_PAIR;
	return sent;
}

/*
 * Finds the flow with the key in args, and updates it by p, unless p opens a connection. Both senders are
 * known by their devices, so their RSTs and FINs count.
 */
static __always_inline bool policy_pair_access(struct flow_args *args, struct packet *p, bool sent)
{
	p->decided.end_expected = true;
	flow_access(packet_opens(p) ? FLOW_READ : sent ? FLOW_SENT : FLOW_RECEIVED);
	p->decided.end_expected = false;
	return args->tracked;
}
