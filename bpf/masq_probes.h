/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * masq_probes: how far to look for the port of a masqueraded flow. A flow that does
 * not have its first candidate notes the time for all up to its own, with each tick
 * in which it has packets. So the notes end as the flow does.
 */
#pragma once

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

/* A flow of the group has candidate last; assured: it gets a copy. */
__noinline int masq_probes_note(__u32 group, __u32 last, __u32 assured)
{
	__u32 now = masq_probes_now();

	if (!last)
		return 0;
	masq_probes_note_in(bpf_map_lookup_elem(&masq_probes, &group), last, now);
	if (assured)
		masq_probes_note_in(bpf_map_lookup_elem(&backup_probes, &group), last, now);
	return 0;
}
