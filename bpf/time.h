/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Time in maps: ticks of 2^30 ns, about a second, so that entries are written no more often. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define TICK_SHIFT     30
#define TICKS(seconds) ((seconds) * 1000000000ULL >> TICK_SHIFT)

static __always_inline __u32 now_ticks(void)
{
	return bpf_ktime_get_ns() >> TICK_SHIFT;
}
