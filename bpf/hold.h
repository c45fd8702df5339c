/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments that come before the first one of their packet. Whose they are
 * only that one says, so they are kept until it comes, and then all are sent
 * through the hook again, in order. A packet whose first fragment never comes
 * is as lost as it would be in a reassembly.
 */
#pragma once

#include "flow.h"
#include "fragment.h"
#include "verdict.h"

#define HELD_FRAGMENTS 64 /* of one packet: 64 KiB in the fragments of an MTU of 1,280 are 53 */
#define HELD_LEAST     20 /* no frame with IP in it is shorter */

/* Two comparisons, which the empty asm keeps from becoming one: older verifiers learn nothing from that. */
static __always_inline bool can_hold(__u32 *length)
{
	if (*length < HELD_LEAST)
		return false;
	asm volatile("" : "+r"(*length));
	return *length <= HELD_MOST;
}

/* Keeps p's frame. Returns false where it cannot, because of its size above all. */
static __noinline bool hold(struct __sk_buff *skb, const struct packet *p)
{
	struct held_key key = {.offset = p->offset};
	struct fragment waiting = {.waiting = 1, .seen = now_ticks()};
	__u32 zero = 0, length = skb->len;
	struct held *held = bpf_map_lookup_elem(&holding, &zero);
	struct fragment *known;

	if (!held || !can_hold(&length))
		return false;
	held->seen = waiting.seen;
	held->length = length;
	if (bpf_skb_load_bytes(skb, 0, held->frame, length))
		return false;
	fragment_key(&key.fragment, p);
	if (bpf_map_update_elem(&held_fragments, &key, held, BPF_ANY))
		return false;
	known = bpf_map_lookup_elem(&fragments, &key.fragment);
	if (known && fragment_is_old(known))
		bpf_map_delete_elem(&fragments, &key.fragment);
	bpf_map_update_elem(&fragments, &key.fragment, &waiting, BPF_NOEXIST);
	return true;
}

/* Sends a held frame through the hook again. The one in skb is overwritten. */
static __noinline void send_again(struct __sk_buff *skb, const struct held_key *key, __u32 flags)
{
	struct held *held = bpf_map_lookup_elem(&held_fragments, key);
	__u32 length;

	if (!held)
		return;
	length = held->length;
	if (can_hold(&length) && now_ticks() - held->seen <= FRAGMENT_TIMEOUT &&
	    !bpf_skb_change_tail(skb, length, 0) &&
	    !bpf_skb_store_bytes(skb, 0, held->frame, length, BPF_F_RECOMPUTE_CSUM))
		bpf_clone_redirect(skb, skb->ifindex, flags);
	bpf_map_delete_elem(&held_fragments, key);
}

/*
 * The first fragment has come, and with it the length of all but the last.
 * Takes the packet: it goes through the hook again too, at the head of the rest.
 */
static __noinline int release_held(struct __sk_buff *skb, const struct packet *p, __u32 flags)
{
	__u32 step = p->payload >> 3;
	struct held_key key = {.offset = step};
	struct fragment *fragment;

	fragment_key(&key.fragment, p);
	fragment = bpf_map_lookup_elem(&fragments, &key.fragment);
	if (fragment)
		fragment->waiting = 0;
	if (bpf_clone_redirect(skb, skb->ifindex, flags))
		return drop(skb, REASON_NOT_WRITTEN);
	for (__u32 i = 1; i < HELD_FRAGMENTS; i++) {
		send_again(skb, &key, flags);
		key.offset += step;
	}
	return VERDICT_DROP; /* no loss: what it was is on its way */
}
