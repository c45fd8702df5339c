/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * masq_probes: how far to search for the port of a masqueraded flow. A flow that does
 * not have its first candidate writes the time for all steps up to its own, once per tick
 * in which it has packets. So the times expire with the flow.
 *
 * moved_flows: whether to search beyond the first candidate at all. Such a flow, and a flow that a
 * remote opens with another client port (dnat.h), writes the time by a hash of its own. An upgrade
 * fills the map, because older programs do not write it.
 */
#pragma once

#include "hash.h"
#include "maps.h"
#include "time.h"

/*
 * Returns the group of the flow, by its container. Neighboring addresses have different ones, so
 * a container that uses up its ports does not prolong others' searches.
 */
static __always_inline __u32 masq_probes_group(const struct flow_key *key, const struct flow *flow)
{
	__u32 remote = key->remote.bytes[15] ^ key->remote_port;

	return (flow->nat_addr.bytes[15] * MASQ_PROBE_REMOTES + remote % MASQ_PROBE_REMOTES) %
	       MASQ_PROBE_GROUPS;
}

static __always_inline __u32 masq_probes_now(void)
{
	return now_ticks() + MASQ_PROBES_EPOCH;
}

static __always_inline void masq_probes_set(struct masq_probes *probes, __u32 step, __u32 now)
{
	if (probes->seen[step] != now)
		probes->seen[step] = now;
}

static __always_inline void masq_probes_record_in(struct masq_probes *probes, __u32 last, __u32 now)
{
	if (!probes)
		return;
	for (__u32 step = 0; step < MASQ_PROBE_STEPS && 1U << step <= last; step++)
		masq_probes_set(probes, step, now);
}

/* Returns the remote of a flow and the address that it is translated to, in one word. */
static __always_inline __u64 moved_sides(const struct addr *remote, const struct addr *addr)
{
	const __u32 *a = (const __u32 *)remote, *b = (const __u32 *)addr;

	return (__u64)(a[0] ^ a[1] ^ a[2] ^ a[3]) << 32 | (b[0] ^ b[1] ^ b[2] ^ b[3]);
}

/* NULL only in a copy of the programs, whose map is smaller. */
static __always_inline __u32 *moved_lookup(__u64 sides, __u32 port)
{
	__u32 hash = hash_mix(hash_mix(config.secret[0], sides >> 32), sides);
	__u32 place = hash_mix(hash, port) % MOVED_FLOWS;

	return bpf_map_lookup_elem(&moved_flows, &place);
}

/* Reports whether a flow of this place without its first candidate has had packets since. */
__noinline int moved_since(__u64 sides, __u32 port, __u32 since)
{
	__u32 *seen = moved_lookup(sides, port);

	return !seen || *seen >= since;
}

/* Records that a flow of the group and place has candidate last; assured: it has a copy. */
__noinline int masq_probes_record(__u32 group, __u32 last, __u32 assured, __u64 sides, __u32 port)
{
	__u32 now = masq_probes_now(), *seen = moved_lookup(sides, port);

	masq_probes_record_in(bpf_map_lookup_elem(&masq_probes, &group), last, now);
	if (assured)
		masq_probes_record_in(bpf_map_lookup_elem(&backup_probes, &group), last, now);
	if (seen && *seen != now && *seen != MOVED_ALWAYS)
		*seen = now;
	return 0;
}

/* Records that the flow does not have its first candidate. */
static __always_inline void masq_probes_record_flow(const struct flow_key *key,
						    const struct flow *flow, bool assured)
{
	masq_probes_record(masq_probes_group(key, flow), flow->probe, assured,
			   moved_sides(&key->remote, &flow->nat_addr), flow->nat_port);
}
