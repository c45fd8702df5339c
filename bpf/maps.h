/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * All maps but the scratch ones; README.md says who writes them. Sizes are limits: only LRU maps and arrays are
 * preallocated.
 */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"
#include "abi_drop.h"
#include "abi_fwd.h"
#include "abi_policy.h"

#define MAP(name, map_type, key_type, value_type, entries, flags)                                  \
	struct {                                                                                   \
		__uint(type, BPF_MAP_TYPE_##map_type);                                             \
		__uint(max_entries, entries);                                                      \
		__uint(map_flags, flags);                                                          \
		__type(key, key_type);                                                             \
		__type(value, value_type);                                                         \
	} name SEC(".maps")

/* ADD writes endpoints before the container can send. */
MAP(endpoints, HASH, struct addr, struct endpoint, 65536, BPF_F_NO_PREALLOC);

/* Written with endpoints, also for a container without addresses. */
MAP(devices, HASH, __u32, struct device, 65536, BPF_F_NO_PREALLOC);

/* Written by ADD after all other maps, removed by DEL before them. A port has two entries for each family. */
MAP(host_ports, HASH, struct host_port_key, struct host_port, 4 * 65536, BPF_F_NO_PREALLOC);

/* config has the number of buckets, which the loader chooses. */
MAP(flow_buckets, ARRAY, __u32, struct flow_bucket, 1, 0);
MAP(flow_table, ARRAY, __u32, struct flow_entry, FLOW_WAYS, 0);

/*
 * Written when a container gets rules: the connections that exist. The
 * programs move an entry to flow_table when a packet needs it.
 */
MAP(admitted_flows, HASH, struct flow_key, struct admitted_flow, 65536, BPF_F_NO_PREALLOC);

MAP(policies, ARRAY, __u32, struct policy, POLICIES, BPF_F_MMAPABLE);

/* Written before the first policy that uses the rule set, removed after the last, with the two maps below. */
MAP(rule_sets, HASH, __u32, struct rule_set, 2 * POLICIES, BPF_F_NO_PREALLOC);
MAP(policy_rules, LPM_TRIE, struct rule_key, struct rule, 1048576, BPF_F_NO_PREALLOC);
MAP(policy_blocks, LPM_TRIE, struct prefix_key, __u32, 262144, BPF_F_NO_PREALLOC);

MAP(peer_classes, HASH, struct addr, __u32, 65536, BPF_F_NO_PREALLOC);
MAP(port_marks, ARRAY, __u32, __u64, PORT_MARKS *PORT_MARK_WORDS, 0);

/* One number. Decisions of an older generation are void. Programs write it, too (stack_hooks_return). */
MAP(generation, ARRAY, __u32, __u64, 1, 0);

MAP(masq_sources, LRU_HASH, struct masq_sources_key, struct masq_sources, 1024, 0);

/*
 * Written once per tick and flow that does not have its first candidate. Key: part of a keyed hash
 * of the remote and of what the flow is translated to.
 */
MAP(moved_flows, ARRAY, __u32, struct moved, MOVED_FLOWS, 0);

MAP(fwd_cache, PERCPU_ARRAY, __u32, struct fwd_entry, FWD_BUCKETS *FWD_WAYS, 0);
MAP(fwd_ways, PERCPU_ARRAY, __u32, struct fwd_ways, FWD_BUCKETS, 0);
MAP(tuple_notes, ARRAY, __u32, __u64, TUPLE_HINTS, 0);

/* Written with a set's first endpoint or host port, removed with the last. */
MAP(prefixes, LPM_TRIE, struct prefix_key, struct addr, 65536, BPF_F_NO_PREALLOC);

MAP(uplinks, HASH, __u32, struct uplink, 1024, BPF_F_NO_PREALLOC);
MAP(nodes, LPM_TRIE, struct prefix_key, struct node, 16384, BPF_F_NO_PREALLOC);
MAP(cluster, ARRAY, __u32, struct cluster, 1, 0);
MAP(routed, ARRAY, __u32, struct routed, ROUTED_TUPLES, 0);
MAP(stack_notes, ARRAY, __u32, struct stack_note, STACK_NOTES, 0);

/*
 * 1 if the host has policy rules that bpf_fib_lookup does not follow: by mark, TOS, flow label or port, and in IPv6 those that
 * suppress routes. Key: 0 for IPv4, 1 for IPv6.
 */
MAP(route_rules, ARRAY, __u32, __u32, 2, 0);

MAP(fragments, LRU_HASH, struct fragment_key, struct fragment, 4096, 0);

/* The first fragment that arrives removes its packet's entries; others expire. */
MAP(frag_queue, LRU_HASH, struct frag_queue_key, struct queued_frag, 1024, 0);

/* Per CPU, so no counter is contended. */
MAP(drop_totals, PERCPU_ARRAY, __u32, struct drop_count, REASON_MAX, 0);

/* An attachment's first drop for a reason writes an entry, DEL removes it. */
MAP(drops, HASH, struct drop_key, struct drop_count, 65536, BPF_F_NO_PREALLOC);

/* Written by the reader of single drops, and by the programs when its lease ends. */
MAP(drop_reader, ARRAY, __u32, struct drop_reader, 1, 0);

MAP(drop_limits, PERCPU_ARRAY, __u32, struct drop_limit, DROP_REASONS, 0);

/* Has up to 840 events. */
struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 256 * 1024); /* bytes */
	__type(value, struct drop_event);
} drop_events SEC(".maps");
