/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Fragments that arrive before the first one of their packet wait for it, because only
 * the first one has the ports. Then the hook receives all of them again, in order. If
 * the first one never arrives, the packet is lost, as in a reassembly.
 */
#pragma once

#include "fragment.h"
#include "scratch.h"
#include "verdict.h"

#define FRAG_QUEUE_PLACES  128 /* per packet: 64 KiB at an MTU of 576 take 119 */
#define FRAG_QUEUE_PLACE   64 /* units of 8 bytes; fragments of at least this size do not collide */
#define FRAG_QUEUE_MIN_LEN 20 /* no frame with an IP header is shorter */

/* A fragment on its way into frag_queue. */
SCRATCH(frag_scratch, struct queued_frag);

/* The place in frag_queue that its functions look at. */
SCRATCH(place_scratch, struct frag_queue_key);

/*
 * The asm keeps the compiler from merging the comparisons, from which older verifiers get no
 * bounds.
 */
static __always_inline bool frag_queue_fits(__u32 *len)
{
	if (*len < FRAG_QUEUE_MIN_LEN)
		return false;
	asm volatile("" : "+r"(*len));
	return *len <= FRAG_QUEUE_MAX_LEN;
}

/*
 * Stores the frame at the place of its offset, or at the next free one. So fragments of any
 * size find a place, and overlapping ones are all passed on to the reassembly, which
 * refuses them. Returns false if no place is free, or the frame is too large.
 */
__noinline int frag_queue_store(struct __sk_buff *skb, __u32 offset)
{
	struct frag_queue_key *key = place_scratch_get();
	struct queued_frag *queued = frag_scratch_get(), *old;
	__u32 len = skb->len;

	if (!key || !queued || !frag_queue_fits(&len))
		return false;
	queued->last_seen = now_ticks();
	queued->len = len;
	if (bpf_skb_load_bytes(skb, 0, queued->frame, len))
		return false;
	for (__u32 i = 0; i < FRAG_QUEUE_PLACES; i++) {
		key->place = (offset / FRAG_QUEUE_PLACE + i) % FRAG_QUEUE_PLACES;
		old = bpf_map_lookup_elem(&frag_queue, key);
		if (old && !fragment_expired(old->last_seen))
			continue;
		if (!bpf_map_update_elem(&frag_queue, key, queued, old ? BPF_ANY : BPF_NOEXIST))
			return true;
	}
	return false;
}

/* Queues p's frame. Returns false if that is impossible. */
static __noinline bool frag_queue_add(struct __sk_buff *skb, const struct packet *p)
{
	struct fragment fragment = {.queued = 1, .last_seen = now_ticks()};
	struct frag_queue_key *key = place_scratch_get();
	struct fragment *known;

	if (!key)
		return false;
	fragment_key(&key->fragment, p);
	if (!frag_queue_store(skb, p->frag_offset))
		return false;
	known = bpf_map_lookup_elem(&fragments, &key->fragment);
	if (known && fragment_expired(known->last_seen))
		bpf_map_delete_elem(&fragments, &key->fragment);
	bpf_map_update_elem(&fragments, &key->fragment, &fragment, BPF_NOEXIST);
	return true;
}

/* Sends the frame at a place to the hook. Overwrites the frame in skb. */
__noinline int frag_queue_resend(struct __sk_buff *skb, __u32 place, __u32 flags)
{
	struct frag_queue_key *key = place_scratch_get();
	struct queued_frag *queued;
	__u32 len;

	if (!key)
		return 0;
	key->place = place;
	queued = bpf_map_lookup_elem(&frag_queue, key);
	if (!queued)
		return 0;
	len = queued->len;
	if (frag_queue_fits(&len) && !fragment_expired(queued->last_seen) &&
	    !bpf_skb_change_tail(skb, len, 0) &&
	    !bpf_skb_store_bytes(skb, 0, queued->frame, len, BPF_F_RECOMPUTE_CSUM))
		bpf_clone_redirect(skb, skb->ifindex, flags);
	bpf_map_delete_elem(&frag_queue, key);
	return 0;
}

/*
 * Sends the first fragment p and then the queued ones to the hook, and drops the
 * original. On egress the program runs again inside bpf_clone_redirect and
 * overwrites *p, but not the key: nothing waits any more.
 */
static __noinline int frag_queue_flush(struct __sk_buff *skb, const struct packet *p, __u32 flags)
{
	struct frag_queue_key *key = place_scratch_get();
	struct fragment *fragment;

	if (!key)
		return VERDICT_DROP;
	fragment_key(&key->fragment, p);
	fragment = bpf_map_lookup_elem(&fragments, &key->fragment);
	if (fragment)
		fragment->queued = 0;
	if (bpf_clone_redirect(skb, skb->ifindex, flags))
		return drop(skb, REASON_REWRITE);
	for (__u32 place = 0; place < FRAG_QUEUE_PLACES; place++)
		frag_queue_resend(skb, place, flags);
	return end_uncounted();
}

/* Reports whether p must wait for its first fragment, or others wait for p. */
static __always_inline bool frag_queue_wants(const struct packet *p, int parsed)
{
	return parsed == PARSED_FRAGMENT || p->decided.flush_queue;
}

/*
 * Handles p at an ingress hook if frag_queue_wants it. A frame that cannot wait goes to the
 * stack.
 */
static __always_inline int frag_queue_ingress(struct __sk_buff *skb, const struct packet *p,
					      int parsed)
{
	if (parsed != PARSED_FRAGMENT)
		return frag_queue_flush(skb, p, BPF_F_INGRESS);
	return frag_queue_add(skb, p) ? end_uncounted() : VERDICT_NEXT;
}
