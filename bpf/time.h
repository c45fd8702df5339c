/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Time in maps: ticks of 2^30 ns, about a second. So entries are written at most once per
 * second.
 */
#pragma once

#include "scratch.h"

#define TICK_SHIFT     30
#define TICKS(seconds) ((seconds) * 1000000000ULL >> TICK_SHIFT)

/*
 * Returns the time in ticks. The clock is read once per packet, because that takes longer than
 * a lookup.
 */
__noinline __u32 now_ticks(void)
{
	struct packet *p = pkt_scratch_get();

	if (!p)
		return 0;
	if (!p->now)
		p->now = bpf_ktime_get_ns() >> TICK_SHIFT;
	return p->now;
}
