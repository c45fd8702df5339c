//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Reports containers' packets that the host's stack drops, to the reader of drop_events. It is not
 * part of the datapath: the reader loads the program on the datapath's maps, and it ends with the
 * reader.
 */
#include <linux/if_ether.h>
#include <bpf/bpf_core_read.h>

#include "addr.h"
#include "drop_event.h"

/*
 * The members that are read of the kernel's structs. Their offsets are set when the program is
 * loaded.
 */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct net_device {
	int ifindex;
	possible_net_t nd_net;
};

struct sk_buff {
	struct net_device *dev;
	int skb_iif;
	unsigned int len;
	__be16 protocol;
	__u16 network_header;
	unsigned int tail;
	unsigned char *head;
};
#pragma clang attribute pop

#define NO_HEADER   0xffff
#define ANY_REASON  0xffffffff
#define OURS_WITHIN 1000000 /* ns until the stack has dropped what a program drops */

/*
 * Set by the reader: offsets in the tracepoint's record, which depend on the kernel, and its
 * filter.
 */
const volatile struct {
	__u32 skb;
	__u32 location;
	__u32 reason; /* 0: it has none, before 5.17 */
	__u32 wanted; /* the only reason to report, or ANY_REASON */
	__u32 netns;  /* the inode number of the host's network namespace */
} stack_config = {.skb = 8, .location = 16, .wanted = ANY_REASON};

static __always_inline __u64 record_word(void *record, __u32 offset)
{
	__u64 word = 0;

	bpf_probe_read_kernel(&word, sizeof(word), record + offset);
	return word;
}

static __always_inline __u32 record_reason(void *record)
{
	__u32 reason = 0;

	if (stack_config.reason)
		bpf_probe_read_kernel(&reason, sizeof(reason), record + stack_config.reason);
	return reason;
}

/* Reports whether the stack drops what a program has just dropped on this CPU. */
static __always_inline bool is_ours(__u64 now)
{
	__u32 key = DROP_STACK;
	struct drop_limit *limit = bpf_map_lookup_elem(&drop_limits, &key);
	bool ours = limit && now - limit->ours < OURS_WITHIN;

	if (ours)
		limit->ours = 0;
	return ours;
}

static __always_inline bool read_addrs(const void *ip, __be16 protocol, struct addr *src,
				       struct addr *dst)
{
	__be32 addrs[2];

	if (protocol == bpf_htons(ETH_P_IPV6))
		return !bpf_probe_read_kernel(src, sizeof(*src), ip + 8) &&
		       !bpf_probe_read_kernel(dst, sizeof(*dst), ip + 24);
	if (protocol != bpf_htons(ETH_P_IP) || bpf_probe_read_kernel(addrs, sizeof(addrs), ip + 12))
		return false;
	addr_from_ipv4(src, addrs[0]);
	addr_from_ipv4(dst, addrs[1]);
	return true;
}

/*
 * Returns the owner of the packet: the container behind one of the devices, or with one of the
 * addresses.
 */
static __always_inline __u64 owner_of(__u32 ifindex, __u32 iif, const struct addr *src,
				      const struct addr *dst)
{
	struct device *device = device_lookup(ifindex);
	struct endpoint *endpoint;

	if (!device)
		device = device_lookup(iif);
	if (device)
		return device->owner;
	if (!bpf_map_lookup_elem(&uplinks, &ifindex))
		return 0;
	endpoint = endpoint_lookup(dst);
	if (!endpoint)
		endpoint = endpoint_lookup(src);
	return endpoint ? endpoint->owner : 0;
}

static __always_inline void copy_bytes(struct drop_event *event, const struct sk_buff *skb,
				       const void *ip, __u32 header)
{
	__u32 len = BPF_CORE_READ(skb, tail) - header;

	if (len > DROP_BYTES)
		len = DROP_BYTES;
	len = ((len - 1) & (DROP_BYTES - 1)) + 1;
	event->captured = bpf_probe_read_kernel(event->bytes, len, ip) ? 0 : len;
}

SEC("tracepoint/skb/kfree_skb")
int stack_drop(void *record)
{
	struct sk_buff *skb = (void *)record_word(record, stack_config.skb);
	struct net_device *dev = BPF_CORE_READ(skb, dev);
	struct drop_reader *reader = drop_reader_get();
	struct addr src = {}, dst = {};
	__u64 owner, now = bpf_ktime_get_ns();
	__u32 ifindex, iif, header, reason = record_reason(record);
	struct drop_event *event;
	__be16 protocol;
	const void *ip;

	if (!reader || !drop_reader_lives(reader, now) || is_ours(now) ||
	    (stack_config.wanted != ANY_REASON && stack_config.wanted != reason) ||
	    BPF_CORE_READ(dev, nd_net.net, ns.inum) != stack_config.netns)
		return 0;
	ifindex = BPF_CORE_READ(dev, ifindex);
	iif = BPF_CORE_READ(skb, skb_iif);
	header = BPF_CORE_READ(skb, network_header);
	protocol = BPF_CORE_READ(skb, protocol);
	ip = BPF_CORE_READ(skb, head) + header;
	if (header == NO_HEADER || !read_addrs(ip, protocol, &src, &dst))
		header = NO_HEADER;
	owner = owner_of(ifindex, iif, &src, &dst);
	if (!owner || !drop_reader_wants(reader, owner, &src, &dst))
		return 0;
	event = drop_event_new(reader, DROP_STACK, now);
	if (!event)
		return 0;
	event->owner = owner;
	event->location = record_word(record, stack_config.location);
	event->reason = reason;
	event->ifindex = ifindex;
	event->ingress_ifindex = iif;
	event->len = BPF_CORE_READ(skb, len);
	event->l3 = 0;
	event->protocol = protocol;
	event->by_stack = 1;
	event->captured = 0;
	if (header != NO_HEADER)
		copy_bytes(event, skb, ip, header);
	bpf_ringbuf_submit(event, BPF_RB_NO_WAKEUP);
	return 0;
}

char _license[] SEC("license") = "Dual BSD/GPL";
