/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* All maps but the scratch ones. Sizes are limits: only LRU maps and arrays are preallocated. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/* Set by the loader before the programs are verified, constant from then on. */
const volatile struct host_config config = {
	.abi = EBPFNET_ABI,
	.attach = ATTACH_TCX,
	.flow_buckets = 1,
	.masq_ports = {{.first = 1024, .count = 28976}},
	.cache_jiffies = 50,
};

/* Written by ADD before the container can send, removed by DEL. Every program reads it. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, struct endpoint);
} endpoints SEC(".maps");

/* Written by ADD with the endpoints, also for a container without addresses; removed by DEL. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct device);
} devices SEC(".maps");

/* Written by ADD after all other maps, removed by DEL before them. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 4 * 65536); /* ports: two families, two directions */
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct host_port_key);
	__type(value, struct host_port);
} host_ports SEC(".maps");

/*
 * Written by the programs. The loader chooses the number of buckets by the host's memory, and
 * config has it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct flow_bucket);
} flow_buckets SEC(".maps");

/* Written with flow_buckets. Key: the number of the bucket times FLOW_WAYS, plus the way. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, FLOW_WAYS);
	__type(key, __u32);
	__type(value, struct flow_entry);
} flow_table SEC(".maps");

/*
 * Written when a container gets rules: the connections that exist. The
 * programs move an entry to flow_table when a packet needs it.
 */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct flow_key);
	__type(value, struct admitted_flow);
} admitted_flows SEC(".maps");

/* Written by ADD for a container with rules, freed by DEL; a pod's by the node agent. User space maps it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, POLICIES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct policy);
} policies SEC(".maps");

/* Written before the first policy that uses the rule set, removed after the last. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 2 * POLICIES);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct rule_set);
} rule_sets SEC(".maps");

/* Written with rule_sets. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 1048576);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct rule_key);
	__type(value, struct rule);
} policy_rules SEC(".maps");

/* Written with rule_sets. The value is the number of the block. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 262144);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, __u32);
} policy_blocks SEC(".maps");

/* Written by the node agent: the classes of pods' addresses, by which rules name peers. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct addr);
	__type(value, __u32);
} peer_classes SEC(".maps");

/* Written by ADD with a number's first host port, never cleared. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4 * PORT_NUMBER_WORDS);
	__type(key, __u32);
	__type(value, __u64);
} port_numbers SEC(".maps");

/* Written by the programs with a port's first connection, never cleared. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 4 * PORT_MARK_WORDS);
	__type(key, __u32);
	__type(value, __u64);
} port_marks SEC(".maps");

/* Written by every process that changes another map of the plugin. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u64);
} generation SEC(".maps");

/* Written by the programs when an uplink's source address changes. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct masq_sources_key);
	__type(value, struct masq_sources);
} masq_sources SEC(".maps");

/*
 * Written by the programs, once per tick and flow that does not have its first candidate. Key:
 * part of a keyed hash of the remote and of what the flow is translated to.
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MOVED_FLOWS);
	__type(key, __u32);
	__type(value, struct moved);
} moved_flows SEC(".maps");

/* Written by the programs, a few times per second and connection. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FWD_BUCKETS *FWD_WAYS);
	__type(key, __u32);
	__type(value, struct fwd_entry);
} fwd_cache SEC(".maps");

/* Written with fwd_cache. Key: the bucket. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, FWD_BUCKETS);
	__type(key, __u32);
	__type(value, struct fwd_ways);
} fwd_ways SEC(".maps");

/* Written by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, TUPLE_HINTS);
	__type(key, __u32);
	__type(value, __u64);
} tuple_notes SEC(".maps");

/* Written by ADD with a set's first endpoint, removed with the last. The value is unused. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, __u32);
} nonmasq_cidrs SEC(".maps");

/* Written by ADD with a set's first host port, removed with the last. The value is unused. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, __u32);
} port_src_ranges SEC(".maps");

/* Written by ADD with a set's first endpoint, removed with the last. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, struct addr);
} gateway_routes SEC(".maps");

/* Written by whoever attaches programs to an uplink; removed when the device is gone. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 1024);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, struct uplink);
} uplinks SEC(".maps");

/* Written by the node agent: the prefixes of all other nodes. */
struct {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct prefix_key);
	__type(value, struct node);
} nodes SEC(".maps");

/* Written by the node agent, with nodes. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct cluster);
} cluster SEC(".maps");

/* Written by the programs. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, ROUTED_TUPLES);
	__type(key, __u32);
	__type(value, struct routed);
} routed SEC(".maps");

/* Written by the programs. A hash of the devices and the family chooses the place. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STACK_NOTES);
	__type(key, __u32);
	__type(value, struct stack_note);
} stack_notes SEC(".maps");

/* Written by every process that looks for uplinks. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u32);
} route_rules SEC(".maps");

/* Written by the programs; entries expire. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 4096);
	__type(key, struct fragment_key);
	__type(value, struct fragment);
} fragments SEC(".maps");

/* Written by the programs, removed when the first fragment arrives; entries expire. */
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 1024);
	__type(key, struct frag_queue_key);
	__type(value, struct queued_frag);
} frag_queue SEC(".maps");

/* Written by the programs. One counter per CPU, so none is contended. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, REASON_MAX);
	__type(key, __u32); /* enum reason; the kernel requires an integer */
	__type(value, struct drop_count);
} drop_totals SEC(".maps");

/* Written by the programs with an attachment's first drop for a reason, removed by DEL. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct drop_key);
	__type(value, struct drop_count);
} drops SEC(".maps");

/* Written by the reader of single drops, and by the programs when its lease ends. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct drop_reader);
} drop_reader SEC(".maps");

/* Written by the programs while there is a reader. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, DROP_REASONS);
	__type(key, __u32);
	__type(value, struct drop_limit);
} drop_limits SEC(".maps");

/* Written by the programs while there is a reader. Has up to 840 events. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024); /* bytes */
	__type(value, struct drop_event);
} drop_events SEC(".maps");
