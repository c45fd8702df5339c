/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* All maps. Their sizes are limits, and cost memory only where the kernel preallocates (flows). */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "packet.h"

/* Set once by the loader, before the verifier sees the programs. */
const volatile struct host_config config = {
	.abi = EBPFNET_ABI,
	.attach = ATTACH_TCX,
	.masq_port_first = 1024,
	.masq_port_count = 28976,
};

/* Written by ADD before the container can send, removed by DEL; read by every program. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct endpoint);
} endpoints SEC(".maps");

/* addr is a container's of that attachment, which is still there. */
static __always_inline bool endpoint_owned_by(__u64 owner, const struct addr *addr)
{
	struct endpoint *endpoint = bpf_map_lookup_elem(&endpoints, addr);

	return endpoint && endpoint->owner == owner;
}

/* Written by ADD with the endpoints, removed by DEL; also of a container without addresses. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct device);
} devices SEC(".maps");

/* What is known of the device that a program runs for; NULL: nothing. */
static __always_inline struct device *device_lookup(struct __sk_buff *skb)
{
	__u32 ifindex = skb->ifindex;

	return bpf_map_lookup_elem(&devices, &ifindex);
}

/* Written by ADD last of all, removed by DEL first of all; read where clients' packets come in. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct host_port_key);
	__type(value, struct host_port);
} host_ports SEC(".maps");

/*
 * Written by the programs; the least recently used entries go for want of room,
 * those of containers that are gone also by GC. The loader sets the size by the host's memory.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows SEC(".maps");

/*
 * Written by the programs, once per tick and connection; serves when flows has
 * lost an entry. Short connections do not stay here, so a flood of them does not
 * push out the quiet ones.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct flow_key);
	__type(value, struct flow);
} flows_backup SEC(".maps");

/* Written by the programs, when a flow has not got its first candidate; never removed. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MASQ_PROBE_GROUPS);
	__type(key, __u32);
	__type(value, struct masq_probes);
} masq_probes SEC(".maps");

/*
 * Written by the programs, when the stack has forwarded a packet. TCP connections
 * leave when they end, so that what is short does not push out what is quiet; of
 * UDP nobody knows the end.
 */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct offload_key);
	__type(value, struct offload);
} offload_tcp SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct offload_key);
	__type(value, struct offload);
} offload_udp SEC(".maps");

/* Written by the programs, a few times per second and connection: what they found out the long way. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct fwd_key);
	__type(value, struct fwd_entry);
} fwd_cache SEC(".maps");

/* Written by ADD of the first endpoint that names a set, removed with the last. The value means nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, __u32);
} nonmasq_cidrs SEC(".maps");

/* Written by ADD of the first host port that names a set, removed with the last. The value means nothing. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, __u32);
} port_src_ranges SEC(".maps");

/* Written by ADD for each uplink it attaches to, removed when the uplink is gone. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct uplink);
} uplinks SEC(".maps");

/* Written by the programs, for as long as a packet's fragments are on their way. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

/* Written by the programs, until the first fragment comes. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct frag_queue_key);
	__type(value, struct queued_frag);
} frag_queue SEC(".maps");

/* Where a program puts a fragment together for held: too large for its stack. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct queued_frag);
} frag_scratch SEC(".maps");

/*
 * Where a program keeps its packet. Not on its stack: what stands in a map is
 * unknown to the verifier, so it does not follow each kind of packet through
 * every function anew (600,000 instructions on 5.10 became 85,000).
 */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct packet);
} pkt_scratch SEC(".maps");

/* The flow that a port is looked for, where masq_try can see it. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_key);
} masq_scratch SEC(".maps");

static __always_inline struct flow_key *masq_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&masq_scratch, &zero);
}

/* Written by the programs, one per CPU: no packet waits for another. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_MAX);
	__type(key, __u32); /* enum reason; the kernel wants an integer here */
	__type(value, struct drop_count);
} drop_totals SEC(".maps");

/* Written by the programs with a container's first drop for a reason, removed by DEL. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct drop_key);
	__type(value, struct drop_count);
} drops SEC(".maps");
