/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What packets that a cached decision forwards (fwd_cache.h) change elsewhere: the state of their connection's flow, and hints for
 * other CPUs.
 */
#pragma once

#include "fwd_entry.h"
#include "policy_pair.h"
#include "policy_rules.h"
#include "tuple_hint.h"

/* Updates the flow with the key in args as flow_access does. The entry knows its place then. */
static __always_inline bool fwd_access(struct flow_args *args, struct fwd_entry *entry,
				       enum flow_access access)
{
	args->known = entry->flow_place;
	entry->flow_place = flow_access(access) && args->tracked ? flow_place_of(args) : 0;
	return entry->flow_place;
}

/* Updates the remote's flow that translates p as the entry says. Returns false if there is none. */
static __always_inline bool fwd_track_received(struct flow_args *args, const struct packet *p,
					       struct fwd_entry *entry, __u64 owner)
{
	struct flow *flow = &args->new;

	flow_received_key(&args->key, packet_tuple(p), entry->flow_kind);
	flow->owner = owner;
	if (entry->flow_kind == FLOW_SNAT) {
		flow->nat_addr = entry->nat_addr;
		flow->nat_port = entry->nat_port;
		flow->remote_port = 0;
	} else {
		args->key.local = entry->nat_addr;
		args->key.local_port = entry->nat_port;
		flow->nat_addr = p->dst;
		flow->nat_port = p->dport;
		flow->remote_port = p->sport;
	}
	return fwd_access(args, entry, FLOW_RECEIVED) && flow_is_same(&args->flow, flow);
}

/* The same for p, which a container sends, and the flow that gives it the entry's source. */
static __always_inline bool fwd_track_sent(struct flow_args *args, const struct packet *p,
					   struct fwd_entry *entry, __u64 owner)
{
	__u8 kind = entry->flags & FWD_REPLY ? FLOW_DNAT : FLOW_SNAT;
	struct flow *flow = &args->new;

	flow_sent_key(&args->key, packet_tuple(p), kind);
	flow->owner = owner;
	args->direct = false;
	if (kind == FLOW_SNAT) {
		args->key.local = entry->nat_addr;
		args->key.local_port = entry->nat_port;
		flow->nat_addr = p->src;
		flow->nat_port = p->sport;
		flow->remote_port = 0;
	} else {
		flow->nat_addr = entry->nat_addr;
		flow->nat_port = entry->nat_port;
		flow->remote_port = p->dport;
	}
	return fwd_access(args, entry, FLOW_SENT) && flow_is_same(&args->flow, flow);
}

/* Updates the flow that translates p, which bypasses the stack, as the entry says. Returns false if there is none. */
static __always_inline bool fwd_track_translated(struct flow_args *args, const struct packet *p,
						 struct fwd_entry *entry)
{
	bool received = entry->action == FWD_CONTAINER;
	struct endpoint *container = endpoint_lookup(received ? &entry->nat_addr : &p->src);

	if (!container)
		return false;
	return received ? fwd_track_received(args, p, entry, container->owner)
			: fwd_track_sent(args, p, entry, container->owner);
}

/*
 * Updates the flow of the packet in pkt_scratch, which has the entry: if it changes the state or follows a SYN
 * or FIN. Others count when a decision is renewed. Returns false if the flow is gone, or if p opens a connection.
 */
static __noinline bool fwd_track(struct fwd_entry *entry)
{
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();

	if (!args || !p || packet_opens(p))
		return false;
	entry->flags &= ~FWD_TRACK;
	if (p->tcp_fin)
		entry->flags |= FWD_TRACK;
	args->new.owner = 0;
	if (entry->flow_kind == FLOW_PAIR)
		return policy_pair_access(args, p, policy_pair_key(&args->key, p));
	if (entry->flow_kind != FLOW_POLICY)
		return fwd_track_translated(args, p, entry);
	flow_sent_key(&args->key, packet_tuple(p), FLOW_POLICY);
	args->new.owner = fwd_entry_owner(entry);
	args->new.policy_generation = policy_generation(entry->policies & 0xffff);
	flow_access(FLOW_SENT);
	return args->tracked;
}

/* Reports whether p updates the flow of its connection here: fwd_cache_receive does it for FWD_FLOW. */
static __always_inline bool fwd_tracks(const struct fwd_entry *entry, const struct packet *p)
{
	return entry->flow_kind && entry->action != FWD_FLOW &&
	       (entry->flags & FWD_TRACK || fwd_changes_state(p));
}

/*
 * Reports whether the entry applies to p, which opens or closes its connection: the entry applies to every packet, or a container
 * closes the connection. A remote's FIN or RST may be forged.
 */
static __always_inline bool fwd_takes_change(const struct fwd_entry *entry, const struct packet *p)
{
	return entry->flags & FWD_EVERY_TCP ||
	       (entry->flow_kind && entry->action != FWD_CONTAINER && !p->tcp_syn &&
		!p->tcp_synack);
}

/* The number of which a side leaves a hint. */
static __always_inline __u32 fwd_hint_number(const struct fwd_entry *entry, const struct packet *p)
{
	return entry->action == FWD_CONTAINER ? packet_seq_end(p) : p->ack;
}

/* Has the entry of p, which has its action, leave hints. A SYN leaves none: anyone may send many. */
static __always_inline void fwd_leave_hint(struct fwd_entry *entry, const struct packet *p)
{
	if (p->protocol != IPPROTO_TCP)
		return;
	entry->hint_id = p->id;
	if (!p->tcp_syn)
		tuple_hint_write(entry->hint_id, fwd_hint_number(entry, p));
	entry->epoch = tuple_hint_epoch(tuple_hint_load(entry->hint_id));
}

/*
 * Leaves a hint of p's number. Reports whether the former one was not taken, or p updates the flow: its reply to a FIN counts.
 * In another epoch, the entry does not apply.
 */
static __always_inline bool fwd_renew_hint(struct fwd_entry *entry, const struct packet *p)
{
	__u64 former;

	if (!entry->hint_id)
		return true;
	former = tuple_hint_load(entry->hint_id);
	if (tuple_hint_epoch(former) != entry->epoch)
		return false;
	if (!(former & HINT_UNTAKEN)) {
		if (!entry->flow_kind)
			return false;
		entry->flags |= FWD_TRACK;
	}
	tuple_hint_write(entry->hint_id, fwd_hint_number(entry, p));
	return true;
}
