/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * moved_flows: how far to search for the port of a flow. A flow that does not have its first
 * candidate, and a flow that a remote opens with another client port (dnat.h), write the time by a
 * hash of their own, once per tick in which they have packets. So the times expire with the flow.
 */
#pragma once

#include "hash.h"
#include "maps.h"
#include "packet.h"

/* Returns the remote of a flow and the address that it is translated to, in one word. */
static __always_inline __u64 moved_sides(const struct addr *remote, const struct addr *addr)
{
	const __u32 *a = (const __u32 *)remote, *b = (const __u32 *)addr;

	return (__u64)(a[0] ^ a[1] ^ a[2] ^ a[3]) << 32 | (b[0] ^ b[1] ^ b[2] ^ b[3]);
}

/* NULL only for the verifier. */
static __always_inline struct moved *moved_lookup(__u64 sides, __u32 port)
{
	__u32 hash = hash_mix(hash_mix(config.secret[0], sides >> 32), sides);
	__u32 place = hash_mix(hash, port) % MOVED_FLOWS;

	return bpf_map_lookup_elem(&moved_flows, &place);
}

/*
 * Returns the number of candidates of a flow of the place that has been idle for at most that many ticks.
 */
__noinline int moved_candidates(__u64 sides, __u32 port, __u32 idle)
{
	struct moved *moved = moved_lookup(sides, port);
	__u32 since = now_ticks() + MOVED_EPOCH - idle;

	if (!moved || moved->seen_far >= since)
		return MASQ_CANDIDATES;
	return moved->seen >= since ? MASQ_NEAR : 1;
}

/* Records that a flow of the place has the candidate, which is not the first one. */
__noinline int moved_record(__u64 sides, __u32 port, __u32 candidate, __u32 ticks)
{
	struct moved *moved = moved_lookup(sides, port);
	__u32 now = ticks + MOVED_EPOCH;

	if (!moved)
		return 0;
	if (moved->seen != now)
		moved->seen = now;
	if (candidate >= MASQ_NEAR && moved->seen_far != now)
		moved->seen_far = now;
	return 0;
}

/* The same, if the flow does not have its first candidate. */
static __always_inline void moved_record_flow(const struct flow_key *key, const struct flow *flow,
					      __u32 now)
{
	if (flow->probe || (key->kind == FLOW_DNAT && key->remote_port != flow->remote_port))
		moved_record(moved_sides(&key->remote, &flow->nat_addr), flow->nat_port,
			     flow->probe, now);
}
