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

/* The place in frag_queue that its functions look at. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct frag_queue_key);
} place_scratch SEC(".maps");

static __always_inline struct frag_queue_key *place_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&place_scratch, &zero);
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

/* The arguments of siphash. */
struct hash_args {
	struct addr a;
	struct addr b;
	__u64 word; /* and the result */
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct hash_args);
} hash_scratch SEC(".maps");

static __always_inline struct hash_args *hash_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&hash_scratch, &zero);
}

/* An entry for flows_backup. */
struct backup_args {
	struct flow_key key;
	struct flow flow;
	__u32 first; /* the number of the first place in the key's bucket */
	__u32 pad;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct backup_args);
} backup_scratch SEC(".maps");

static __always_inline struct backup_args *backup_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&backup_scratch, &zero);
}

/* The next state of a flow, or a new flow. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow);
} flow_scratch SEC(".maps");

static __always_inline struct flow *flow_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&flow_scratch, &zero);
}

/* A masqueraded flow to find or to create: the arguments of masq.h's functions. */
struct masq_args {
	struct flow_key key; /* local_port: the result */
	struct flow flow;
	__u32 hash;  /* of the tuple without the container's port, with the host's secret */
	__u32 share; /* chooses the ports that the container may have towards the remote */
	__u32 ended; /* a candidate whose flow has ended */
	bool ipv6;
	bool has_ports;
	bool read_only; /* the flow's packet is not at hand: it is not noted */
	__u8 pad;
	struct masq_sources sources; /* an entry for masq_sources */
	struct fwd_key tuple;	     /* of a packet that is not at hand yet */
	__u32 pad2;
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
