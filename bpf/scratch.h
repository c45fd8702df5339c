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

#include "abi.h"
#include "packet.h"

/*
 * The packet that the program runs for. The verifier does not track values in
 * a map, so it does not explore every function again for each kind of packet.
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct packet);
} pkt_scratch SEC(".maps");

/* Only for entry programs, which pass the packet on. NULL only for the verifier. */
static __always_inline struct packet *pkt_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pkt_scratch, &zero);
}

/* A fragment on its way into frag_queue. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct queued_frag);
} frag_scratch SEC(".maps");

static __always_inline struct queued_frag *frag_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&frag_scratch, &zero);
}

/* The arguments of fib_args_are_local. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, sizeof(struct bpf_fib_lookup));
} fib_scratch SEC(".maps");

static __always_inline struct bpf_fib_lookup *fib_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&fib_scratch, &zero);
}

/* The arguments of masq_try_candidate: an entry for flows. */
struct masq_args {
	struct flow_key key; /* local_port: the result */
	struct flow flow;
	__u8 ipv6;
	__u8 has_ports;
	__u8 pad[6];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct masq_args);
} masq_scratch SEC(".maps");

static __always_inline struct masq_args *masq_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&masq_scratch, &zero);
}
