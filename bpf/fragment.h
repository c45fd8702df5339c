/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Ports of fragments: only the first fragment carries them, so they are kept for the others. */
#pragma once

#include "maps.h"
#include "packet.h"

#define INGRESS_UNKNOWN (~0U) /* no device has this number */

/* The default of net.ipv4.ipfrag_time: later, the same id belongs to another packet. */
#define FRAGMENT_TIMEOUT TICKS(30)

#define IPV4_FRAGMENT_MASK 0x3fff /* more fragments, or an offset (RFC 791) */
#define IPV4_OFFSET_MASK   0x1fff

/* RFC 8200, 4.5 */
struct fragment_header {
	__u8 next;
	__u8 reserved;
	__be16 offset;
	__be32 id;
};

static __always_inline bool packet_is_fragment(const struct packet *p)
{
	return p->frag_id || p->frag_offset;
}

/*
 * Returns the device by which p, which a last hook sends, has entered the host; 0: the host sends it. The kernel loses it when it
 * splits a reassembled IPv6 packet again (ip6_copy_metadata; ip_copy_metadata keeps it). Such fragments have no socket, unlike
 * the host's own.
 */
static __always_inline __u32 packet_ingress(struct __sk_buff *skb, const struct packet *p)
{
	if (!skb->ingress_ifindex && p->ipv6 && packet_is_fragment(p) && !skb->sk)
		return INGRESS_UNKNOWN;
	return skb->ingress_ifindex;
}

static __always_inline void fragment_key(struct fragment_key *key, const struct packet *p)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->src = p->src;
	key->dst = p->dst;
	key->id = p->frag_id;
	key->protocol = p->protocol;
}

static __always_inline bool fragment_expired(__u32 last_seen)
{
	return now_ticks() - last_seen > FRAGMENT_TIMEOUT;
}

/*
 * Records the first fragment p. Several hooks see it, so queued stays set until
 * the hook that queued later fragments has flushed them.
 */
static __always_inline void fragment_track(const struct fragment_key *key, struct packet *p,
					   bool unreadable)
{
	struct fragment *known;
	struct fragment fragment = {
		.sport = p->sport,
		.dport = p->dport,
		.echo_reply = p->echo_reply,
		.has_ports = p->has_ports,
		.unreadable = unreadable,
		.last_seen = now_ticks(),
	};

	known = bpf_map_lookup_elem(&fragments, key);
	p->decided.flush_queue = known && known->queued;
	fragment.queued = p->decided.flush_queue;
	bpf_map_update_elem(&fragments, key, &fragment, BPF_ANY);
}

/* Gives the later fragment p the ports of the first, if that was seen. Returns an enum parsed. */
static __always_inline int fragment_fill_ports(struct packet *p)
{
	struct fragment_key key;
	struct fragment *fragment;

	fragment_key(&key, p);
	fragment = bpf_map_lookup_elem(&fragments, &key);
	if (!fragment || fragment->queued || fragment_expired(fragment->last_seen))
		return PARSED_FRAGMENT;
	if (fragment->unreadable)
		return PARSED_PROTOCOL;
	p->sport = fragment->sport;
	p->dport = fragment->dport;
	p->echo_reply = fragment->echo_reply;
	p->has_ports = fragment->has_ports;
	p->non_first_frag = true;
	return PARSED;
}
