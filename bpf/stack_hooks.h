/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What the host's stack does with forwarded packets besides routing them: netfilter, IPsec, and
 * tc programs of others. While there is nothing, fastPath auto acts as always.
 */
#pragma once

#include <bpf/bpf_core_read.h>

#include "endpoint.h"
#include "fwd_entry.h"
#include "hash.h"
#include "kernel.h"
#include "packet.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct nf_hook_entry {
	void *hook;
	void *priv;
};

struct nf_hook_entries {
	__u16 num_hook_entries;
	struct nf_hook_entry hooks[];
};

struct nf_hook_ops {
	int priority;
};

struct netns_nf {
	struct nf_hook_entries *hooks_ipv4[5];
	struct nf_hook_entries *hooks_ipv6[5];
	struct nf_hook_entries *hooks_bridge[5];
};

struct netns_xfrm {
	unsigned int policy_count[6]; /* the last three are of sockets */
	__u8 policy_default[3];
};

struct xarray {
	void *xa_head;
};

struct xa_node {
	unsigned char shift;
	void *slots[64];
};

struct net {
	struct netns_nf nf;
	struct netns_xfrm xfrm;
	struct xarray dev_by_index;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct tcf_proto {
	struct tcf_proto *next;
};

struct mini_Qdisc {
	struct tcf_proto *filter_list;
};

struct bpf_mprog_bundle {
	__u32 count;
};

struct bpf_mprog_entry {
	struct bpf_mprog_bundle *parent;
};

struct tcx_entry {
	struct mini_Qdisc *miniq;
	struct bpf_mprog_bundle bundle;
};

struct net_device {
	possible_net_t nd_net;
	int ifindex;
	struct nf_hook_entries *nf_hooks_ingress;
	struct nf_hook_entries *nf_hooks_egress;
	struct bpf_mprog_entry *tcx_ingress;
	struct bpf_mprog_entry *tcx_egress;
};

#pragma clang attribute pop

enum nf_hook {
	NF_PREROUTING = 0,
	NF_FORWARD = 2,
	NF_POSTROUTING = 4,
};

#define NF_PRIORITY_APPARMOR -225 /* NF_IP_PRI_SELINUX_FIRST */

#define XFRM_DIRECTIONS 3
#define XFRM_BLOCK	1 /* XFRM_USERPOLICY_BLOCK */
#define XA_MAX_LEVELS	6 /* of 64 slots, for an ifindex */

/*
 * Reports whether the only hook is AppArmor's, which all network namespaces have. It lets packets
 * pass, unless a rule, and so another hook, has given them a security mark.
 */
static __always_inline bool nf_is_apparmor(const struct nf_hook_entries *hooks)
{
	/* The addresses of the hooks' descriptions follow the last hook. */
	return hooks->num_hook_entries == 1 && !hooks->hooks[0].priv &&
	       KERNEL_AT(struct nf_hook_ops, hooks->hooks[1].hook)->priority ==
		       NF_PRIORITY_APPARMOR;
}

/* Reports whether there are hooks for forwarded packets. */
#define NF_ANY_HOOK(hooks)                                                                         \
	((hooks)[NF_PREROUTING] || (hooks)[NF_FORWARD] ||                                          \
	 ((hooks)[NF_POSTROUTING] && !nf_is_apparmor((hooks)[NF_POSTROUTING])))

/* Returns what the network namespace has: enum stack_hook. */
static __always_inline __u32 net_hooks(const struct net *net, bool ipv6, __u32 one, __u32 other)
{
	struct device *device;
	__u32 found = 0;

	if (bpf_core_field_exists(net->nf.hooks_ipv4) && !ipv6 && NF_ANY_HOOK(net->nf.hooks_ipv4))
		found |= HOOK_NETFILTER;
	if (bpf_core_field_exists(net->nf.hooks_ipv6) && ipv6 && NF_ANY_HOOK(net->nf.hooks_ipv6))
		found |= HOOK_NETFILTER;
	if (bpf_core_field_exists(net->nf.hooks_bridge) && NF_ANY_HOOK(net->nf.hooks_bridge)) {
		device = device_lookup(one);
		if ((device && device->flags & DEVICE_BRIDGED) || is_bridge(one) ||
		    is_bridge(other))
			found |= HOOK_BRIDGE;
	}
	for (int i = 0; i < XFRM_DIRECTIONS; i++) {
		if (bpf_core_field_exists(net->xfrm.policy_count) && net->xfrm.policy_count[i])
			found |= HOOK_IPSEC;
		if (bpf_core_field_exists(net->xfrm.policy_default) &&
		    net->xfrm.policy_default[i] == XFRM_BLOCK)
			found |= HOOK_IPSEC;
	}
	return found;
}

/* Reports whether a side of a device has more than one tc program or filter: besides ours. */
static __always_inline bool tcx_has_others(const struct bpf_mprog_entry *entry)
{
	const struct bpf_mprog_bundle *bundle;
	const struct tcf_proto *filter = NULL;
	const struct mini_Qdisc *qdisc;

	if (!entry)
		return false;
	bundle = entry->parent;
	qdisc = KERNEL_AT(struct tcx_entry,
			  (__u64)bundle - bpf_core_field_offset(struct tcx_entry, bundle))
			->miniq;
	if (qdisc)
		filter = qdisc->filter_list;
	return bundle->count + (filter ? filter->next ? 2 : 1 : 0) > 1;
}

/* Returns what a device has: enum stack_hook. tc programs on egress of an uplink see all packets. */
static __always_inline __u32 device_hooks(const struct net_device *dev)
{
	__u32 found = 0;

	if (bpf_core_field_exists(dev->nf_hooks_ingress) && dev->nf_hooks_ingress)
		found |= HOOK_NETDEV;
	if (bpf_core_field_exists(dev->nf_hooks_egress) && dev->nf_hooks_egress)
		found |= HOOK_NETDEV;
	if (bpf_core_field_exists(dev->tcx_ingress) &&
	    (tcx_has_others(dev->tcx_ingress) ||
	     (tcx_has_others(dev->tcx_egress) && !is_uplink(dev->ifindex))))
		found |= HOOK_TC;
	return found;
}

/* Returns the address of the device, from the kernel's table of devices; 0: none. */
static __always_inline __u64 device_address(const struct net *net, __u32 ifindex)
{
	__u64 entry = (__u64)net->dev_by_index.xa_head, slot;
	const __u32 mask = bpf_core_field_size(struct xa_node, slots) / sizeof(void *) - 1;

	for (int level = 0; level < XA_MAX_LEVELS && (entry & 3) == 2; level++) {
		entry -= 2; /* the mark of an inner node */
		slot = ifindex >> (KERNEL_AT(struct xa_node, entry)->shift & 31) & mask;
		entry = (__u64)KERNEL_AT(struct xa_node, entry + slot * sizeof(void *))->slots[0];
	}
	return entry & 3 ? 0 : entry;
}

/* Returns a hash of two devices, in any order. */
static __always_inline __u32 devices_hash(__u32 a, __u32 b)
{
	return hash_mix(hash_mix((__u32)config.secret[0], a < b ? a : b), a < b ? b : a);
}

/*
 * Returns the note of the devices with the hash, which others of the same family share: if one pair has no hooks, most likely
 * the other has none either. NULL only for the verifier.
 */
static __always_inline struct stack_note *stack_note_lookup(__u32 hash, bool ipv6)
{
	__u32 place = hash % (STACK_NOTES / 2) * 2 | ipv6;

	return bpf_map_lookup_elem(&stack_notes, &place);
}

/* What stack_hooks_of returns, read from the kernel's structures. */
static __always_inline __u32 stack_hooks_read(struct __sk_buff *skb, __u32 other, bool ipv6)
{
	const struct sk_buff *packet = bpf_cast_to_kern_ctx(skb);
	const struct net_device *dev = packet->dev;
	const struct net *net = dev->nd_net.net;
	__u32 found = net_hooks(net, ipv6, dev->ifindex, other);
	__u64 address;

	if (found)
		return found;
	found = device_hooks(dev);
	if (!other)
		return found;
	address = device_address(net, other);
	return address ? found | device_hooks(KERNEL_AT(struct net_device, address)) : HOOK_UNKNOWN;
}

/*
 * Voids all cached decisions if the devices with the hash had no hooks until now, as last says. If that is of other devices, once
 * per tick: the two may differ for long.
 */
static __always_inline void stack_hooks_return(volatile struct stack_note *note, __u64 last,
					       __u64 hash)
{
	__u32 zero = 0, tick = now_ticks();
	__u64 *number;

	if (!last || last & 0xff || (last >> 32 != hash && note->voided == tick))
		return;
	note->voided = tick;
	number = bpf_map_lookup_elem(&generation, &zero);
	if (number)
		*number = bpf_get_prandom_u32();
}

/*
 * Returns what the stack has for forwarded packets of skb's family and device, and of the device other, where the packets come from or
 * go to; 0: unknown. The result has bits of enum stack_hook: those of devices only if there are no others. Reads the kernel's
 * structures once per jiffy and generation: the note has a hash of the devices, 24 bits of these two, and 8 of the result. Without hooks,
 * packets between the two devices bypass the stack without an entry. So records of the stack are void: if its hooks return, it
 * has not seen these packets. Then all cached decisions are void, too: if only some packets of a connection went through the
 * stack, conntrack would take them for invalid.
 */
__noinline enum stack_hook stack_hooks_of(struct __sk_buff *skb, __u32 other)
{
	struct packet *p = pkt_scratch_get();
	volatile struct stack_note *note;
	__u64 hash, now, last;
	__u32 found;
	bool ipv6;

	if (!p || !config.sees_hooks)
		return HOOK_UNKNOWN;
	/* Read once: a packet may interrupt a test run of the program stack_hooks. */
	ipv6 = *(volatile bool *)&p->ipv6;
	hash = devices_hash(skb->ifindex, other);
	note = stack_note_lookup(hash, ipv6);
	if (!note)
		return HOOK_UNKNOWN;
	now = hash << 32 | ((__u32)bpf_jiffies64() ^ generation_get()) << 8;
	last = note->hooks;
	if (last >> 8 == now >> 8)
		return last & 0xff;
	found = stack_hooks_read(skb, other, ipv6);
	note->hooks = now | found;
	if (found)
		stack_hooks_return(note, last, hash);
	else if (other)
		note->bypassed = now_ticks();
	return found;
}

#define FAST_PATH_AUTO_BIT (FAST_PATH_AUTO & ~FAST_PATH_ALWAYS)

/*
 * Returns the fast path between endpoints with a and b: the more restrictive one. Values of other
 * versions are combined by their bits.
 */
static __always_inline __u8 fast_path_between(__u8 a, __u8 b)
{
	if (a == FAST_PATH_AUTO && b == FAST_PATH_ALWAYS)
		return a;
	if (b == FAST_PATH_AUTO && a == FAST_PATH_ALWAYS)
		return b;
	return a & b;
}

/* Returns what the fast path is for a packet, on its way from or to the device other: never auto. */
static __always_inline __u8 fast_path_now(struct __sk_buff *skb, __u8 fast_path, __u32 other)
{
	if (fast_path != FAST_PATH_AUTO)
		return fast_path;
	if (!config.sees_hooks || stack_hooks_of(skb, other))
		return FAST_PATH_ESTABLISHED;
	return FAST_PATH_ALWAYS;
}
