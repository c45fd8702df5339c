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

#define FRAG_QUEUE_MAX	   64 /* of one packet: 64 KiB in the fragments of an MTU of 1,280 are 53 */
#define FRAG_QUEUE_MIN_LEN 20 /* no frame with IP in it is shorter */

/* Two comparisons, which the empty asm keeps from becoming one: older verifiers learn nothing from that. */
static __always_inline bool frag_queue_fits(__u32 *length)
{
	if (*length < FRAG_QUEUE_MIN_LEN)
		return false;
	asm volatile("" : "+r"(*length));
	return *length <= FRAG_QUEUE_MAX_LEN;
}

/* Keeps p's frame. Returns false where it cannot, because of its size above all. */
static __noinline bool frag_queue_add(struct __sk_buff *skb, const struct packet *p)
{
	struct frag_queue_key key = {.offset = p->frag_offset};
	struct fragment waiting = {.queued = 1, .last_seen = now_ticks()};
	__u32 zero = 0, length = skb->len;
	struct queued_frag *held = bpf_map_lookup_elem(&frag_scratch, &zero);
	struct fragment *known;

	if (!held || !frag_queue_fits(&length))
		return false;
	held->last_seen = waiting.last_seen;
	held->len = length;
	if (bpf_skb_load_bytes(skb, 0, held->frame, length))
		return false;
	fragment_key(&key.fragment, p);
	if (bpf_map_update_elem(&frag_queue, &key, held, BPF_ANY))
		return false;
	known = bpf_map_lookup_elem(&fragments, &key.fragment);
	if (known && fragment_expired(known))
		bpf_map_delete_elem(&fragments, &key.fragment);
	bpf_map_update_elem(&fragments, &key.fragment, &waiting, BPF_NOEXIST);
	return true;
}

/* Sends a held frame through the hook again. The one in skb is overwritten. */
static __noinline void frag_queue_resend(struct __sk_buff *skb, const struct frag_queue_key *key,
					 __u32 flags)
{
	struct queued_frag *held = bpf_map_lookup_elem(&frag_queue, key);
	__u32 length;

	if (!held)
		return;
	length = held->len;
	if (frag_queue_fits(&length) && now_ticks() - held->last_seen <= FRAGMENT_TIMEOUT &&
	    !bpf_skb_change_tail(skb, length, 0) &&
	    !bpf_skb_store_bytes(skb, 0, held->frame, length, BPF_F_RECOMPUTE_CSUM))
		bpf_clone_redirect(skb, skb->ifindex, flags);
	bpf_map_delete_elem(&frag_queue, key);
}

/*
 * The first fragment has come, and with it the length of all but the last.
 * Takes the packet: it goes through the hook again too, at the head of the rest.
 */
static __noinline int frag_queue_flush(struct __sk_buff *skb, const struct packet *p, __u32 flags)
{
	__u32 step = p->frag_len >> 3;
	struct frag_queue_key key = {.offset = step};
	struct fragment *fragment;

	fragment_key(&key.fragment, p);
	fragment = bpf_map_lookup_elem(&fragments, &key.fragment);
	if (fragment)
		fragment->queued = 0;
	if (bpf_clone_redirect(skb, skb->ifindex, flags))
		return drop(skb, REASON_REWRITE);
	for (__u32 i = 1; i < FRAG_QUEUE_MAX; i++) {
		frag_queue_resend(skb, &key, flags);
		key.offset += step;
	}
	return VERDICT_DROP; /* no loss: what it was is on its way */
}
