/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments that arrive before the first one of their packet. Only that one tells
 * their connection, so they wait for it. Then the hook receives all of them
 * again, in order. If it never arrives, the packet is lost, as in a reassembly.
 */
#pragma once

#include "flow.h"
#include "fragment.h"
#include "scratch.h"
#include "verdict.h"

#define FRAG_QUEUE_MAX	   64 /* per packet: 64 KiB in fragments for an MTU of 1,280 are 53 */
#define FRAG_QUEUE_MIN_LEN 20 /* no frame with an IP header is shorter */

/* The asm keeps two comparisons from becoming one, which would teach older verifiers no bounds. */
static __always_inline bool frag_queue_fits(__u32 *len)
{
	if (*len < FRAG_QUEUE_MIN_LEN)
		return false;
	asm volatile("" : "+r"(*len));
	return *len <= FRAG_QUEUE_MAX_LEN;
}

/* Queues p's frame. Returns false if that is impossible: most often the frame is too large. */
static __noinline bool frag_queue_add(struct __sk_buff *skb, const struct packet *p)
{
	struct frag_queue_key key = {.offset = p->frag_offset};
	struct fragment fragment = {.queued = 1, .last_seen = now_ticks()};
	struct queued_frag *queued = frag_scratch_get();
	struct fragment *known;
	__u32 len = skb->len;

	if (!queued || !frag_queue_fits(&len))
		return false;
	queued->last_seen = fragment.last_seen;
	queued->len = len;
	if (bpf_skb_load_bytes(skb, 0, queued->frame, len))
		return false;
	fragment_key(&key.fragment, p);
	if (bpf_map_update_elem(&frag_queue, &key, queued, BPF_ANY))
		return false;
	known = bpf_map_lookup_elem(&fragments, &key.fragment);
	if (known && fragment_expired(known))
		bpf_map_delete_elem(&fragments, &key.fragment);
	bpf_map_update_elem(&fragments, &key.fragment, &fragment, BPF_NOEXIST);
	return true;
}

/* Sends a queued frame to the hook. Overwrites the frame in skb. */
static __noinline void frag_queue_resend(struct __sk_buff *skb, const struct frag_queue_key *key,
					 __u32 flags)
{
	struct queued_frag *queued = bpf_map_lookup_elem(&frag_queue, key);
	__u32 len;

	if (!queued)
		return;
	len = queued->len;
	if (frag_queue_fits(&len) && now_ticks() - queued->last_seen <= FRAGMENT_TIMEOUT &&
	    !bpf_skb_change_tail(skb, len, 0) &&
	    !bpf_skb_store_bytes(skb, 0, queued->frame, len, BPF_F_RECOMPUTE_CSUM))
		bpf_clone_redirect(skb, skb->ifindex, flags);
	bpf_map_delete_elem(&frag_queue, key);
}

/*
 * Sends the first fragment p and then the queued ones to the hook, and drops the
 * original. The first one's length tells the offsets of the others. On egress the
 * program runs again inside bpf_clone_redirect and overwrites *p.
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
	return VERDICT_DROP;
}
