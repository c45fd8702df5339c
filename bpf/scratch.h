/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Per-CPU memory that a program uses for one packet. Nothing in it outlives the
 * packet, so it is not part of the ABI: each build has scratch maps of its own.
 *
 * Two kinds:
 *  - what is too large for the stack;
 *  - the arguments of global functions. The verifier checks such a function once,
 *    and not for every call, but before 5.12 it takes only skb and scalars. Its
 *    caller passes the rest here.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/* A map with one value per CPU, and its getter, which returns NULL only for the verifier. */
#define SCRATCH(name, value_type)                                                                  \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);                                           \
		__uint(max_entries, 1);                                                            \
		__uint(key_size, sizeof(__u32));                                                   \
		__uint(value_size, sizeof(value_type));                                            \
	} name SEC(".maps");                                                                       \
                                                                                                   \
	static __always_inline value_type *name##_get(void)                                        \
	{                                                                                          \
		__u32 zero = 0;                                                                    \
                                                                                                   \
		return bpf_map_lookup_elem(&name, &zero);                                          \
	}
