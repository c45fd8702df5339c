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

/* Keeps the compiler from removing a global function's argument, which the verifier requires. */
#define USE_ARGUMENT(x) asm volatile("" : : "r"(x))

/*
 * The packet that the program runs for, for entry programs, which pass it on. The
 * verifier does not track values in a map, so it does not explore every function
 * again for each kind of packet.
 */
SCRATCH(pkt_scratch, struct packet);

/* A fragment on its way into frag_queue. */
SCRATCH(frag_scratch, struct queued_frag);

/* The place in frag_queue that its functions look at. */
SCRATCH(place_scratch, struct frag_queue_key);

/* The arguments of fib_args_are_local. */
SCRATCH(fib_scratch, struct bpf_fib_lookup);

/* The arguments of siphash. */
struct hash_args {
	struct addr a;
	struct addr b;
	__u64 word; /* and the result */
};

SCRATCH(hash_scratch, struct hash_args);

/* The flow of a packet to a container. */
struct dnat {
	struct flow_key key; /* if there is none: a free one */
	bool free;	     /* the key is free */
};

/* A flow to find, to update, or to create: the arguments of flow_table.h's functions. */
struct flow_args {
	struct flow_key key;
	struct flow flow; /* the one that was found */
	struct flow new;
	__u32 access;  /* enum flow_access of dnat_find */
	bool tracked;  /* the packet has updated the flow */
	bool direct;   /* FLOW_DNAT, FLOW_SENT: a flow that translates nothing, not one that does */
	__u64 version; /* of the flow to replace */
	__u32 replaced; /* its id; 0: the place is free */
	__u32 known;	/* where the next lookup may find the flow: flow_place_of; 0: not known */
	__u32 bucket;	/* of the key */
	__u32 id;
	struct flow_key hashed; /* the tuple of hash */
	__u64 hash;
	__u32 way; /* or FLOW_WAYS. Not in a register, where the verifier would follow each value. */
	__u32 now;
	__u64 free_version; /* as version and replaced, for free_way */
	__u32 free_id;
	__u32 free; /* number of free places in the bucket, or with useless flows, and one of them */
	__u32 free_way;
	__u32 keep;	  /* id of a flow that must not be replaced; 0: none */
	__u32 own;	  /* number of the payer's flows in the bucket */
	__u32 others;	  /* number of others' flows that are not assured */
	__u32 weight;	  /* of the flow to replace */
	struct dnat dnat; /* of host_port_forward */
};

enum flow_weight {
	/* of another container's flow: how long it has been idle */
	FLOW_OWN = 1U << 30, /* plus the same */
};

SCRATCH(flow_scratch, struct flow_args);

/* A masqueraded flow to find or to create: the arguments of masq.h's functions. */
struct masq_args {
	struct flow_key key; /* local_port: the result */
	struct flow flow;
	__u32 hash;  /* of the tuple without the container's port, with the host's secret */
	__u32 share; /* chooses the ports that the container may use towards the remote */
	__u32 ended; /* a candidate whose flow has ended */
	bool ipv6;
	bool has_ports;
	bool read_only;		     /* the flow is only searched for, not updated */
	bool has_former;	     /* the uplink has had another source */
	struct masq_sources sources; /* an entry for masq_sources */
	struct fwd_key
		tuple; /* of a packet that is not in pkt_scratch, or a key of route_cache.h */
};

SCRATCH(masq_scratch, struct masq_args);
