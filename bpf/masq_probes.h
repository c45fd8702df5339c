/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * masq_probes: how far to look for the port of a masqueraded flow. A flow that does
 * not have its first candidate notes the time for all up to its own, with each tick
 * in which it has packets. So the notes end as the flow does.
 *
 * moved_flows: whether to look further than the first candidate at all. Such a flow, and one
 * that a remote opens and that has another client port (dnat.h), notes the time there by a hash
 * of its own. An upgrade fills the map: older programs note nothing in it.
 */
#pragma once

#include "hash.h"
#include "maps.h"
#include "time.h"

/*
 * The group of the flow, by the container: neighboring addresses have different ones,
 * so a container that uses up its ports makes nobody else look further.
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

static __always_inline void masq_probes_note_in(struct masq_probes *probes, __u32 last, __u32 now)
{
	if (!probes)
		return;
	for (__u32 step = 0; step < MASQ_PROBE_STEPS && 1U << step <= last; step++)
		masq_probes_set(probes, step, now);
}

/* The remote of a flow and the address that it is translated to, in a word. */
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

/* A flow of this place, which does not have its first candidate, has had packets since. */
__noinline int moved_since(__u64 sides, __u32 port, __u32 since)
{
	__u32 *seen = moved_lookup(sides, port);

	return !seen || *seen >= since;
}

/* A flow of the group and of the place has candidate last; assured: it gets a copy. */
__noinline int masq_probes_note(__u32 group, __u32 last, __u32 assured, __u64 sides, __u32 port)
{
	__u32 now = masq_probes_now(), *seen = moved_lookup(sides, port);

	masq_probes_note_in(bpf_map_lookup_elem(&masq_probes, &group), last, now);
	if (assured)
		masq_probes_note_in(bpf_map_lookup_elem(&backup_probes, &group), last, now);
	if (seen && *seen != now && *seen != MOVED_ALWAYS)
		*seen = now;
	return 0;
}

/* The flow does not have its first candidate. */
static __always_inline void masq_probes_note_flow(const struct flow_key *key,
						  const struct flow *flow, bool assured)
{
	masq_probes_note(masq_probes_group(key, flow), flow->probe, assured,
			 moved_sides(&key->remote, &flow->nat_addr), flow->nat_port);
}
