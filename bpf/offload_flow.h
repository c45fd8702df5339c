/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The flow of an offloaded connection: a program works on a copy, and merges what it changes into
 * flow_table, because the two sides' packets may be on different CPUs.
 */
#pragma once

#include "flow_table.h"
#include "packet.h"
#include "scratch.h"
#include "verdict.h"

#define OFFLOAD_DELIVERED_BOTH (OFFLOAD_DELIVERED | OFFLOAD_DELIVERED << 1)
#define OFFLOAD_FIN_BOTH       (OFFLOAD_FIN | OFFLOAD_FIN << 1)
#define OFFLOAD_FIN_ACK_BOTH   (OFFLOAD_FIN_ACK | OFFLOAD_FIN_ACK << 1)

/* The connection of a packet p, with its flow. */
struct connection {
	struct flow_key key;
	__u8 side;		 /* which side in key has sent p: 0 or 1 */
	__u32 device;		 /* of the container, or of one */
	__u32 other;		 /* of the other container; 0: the uplink */
	__u32 uplink;		 /* as in struct offload */
	__u64 owner;		 /* as in struct offload */
	__u64 owners;		 /* as payer in struct offload */
	__u64 ct;		 /* as in struct offload; 0: not translated */
	struct offload *offload; /* a copy of the flow, or NULL */
};

/* The copy of a connection's flow, and how it was before. */
struct offload_copy {
	struct offload now;
	struct offload before;
};

SCRATCH(offload_scratch, struct offload_copy);

/* Sets c's containers: its packets go from one to the other; NULL: the outside, by the uplink. */
static __always_inline void offload_set_ends(struct connection *c, const struct endpoint *from,
					     const struct endpoint *to, __u32 uplink)
{
	const struct endpoint *one = from ?: to;

	if (!one)
		return;
	c->device = one->ifindex;
	c->other = from && to ? to->ifindex : 0;
	c->uplink = c->other ? 0 : uplink;
	c->owners = one->owner;
	if (c->other && from != to) /* else a container reaches itself, by a service */
		c->owners ^= to->owner;
}

/* Sets c's key and side for p, addressed to addr:port. */
static __always_inline void offload_init(struct connection *c, const struct packet *p,
					 const struct addr *addr, __u16 port)
{
	c->side = offload_key(&c->key, packet_tuple(p), addr, port);
}

/* Finds the connection's flow, and copies it. */
static __always_inline void offload_find(struct connection *c)
{
	struct offload_copy *copy = offload_scratch_get();
	struct flow_args *args = flow_scratch_get();

	c->offload = NULL;
	if (!copy || !args)
		return;
	args->key = c->key;
	if (!flow_lookup(args) || flow_expired(&args->flow))
		return;
	copy->now = *(struct offload *)&args->flow;
	copy->before = copy->now;
	c->offload = &copy->now;
}

/*
 * Reports whether both sides have ended the connection, and one has acknowledged the other's FIN, which shows that it was not
 * forged. The last ACK is forwarded by a cached decision, so it is not awaited.
 */
static __always_inline bool offload_is_ending(const struct offload *offload)
{
	return (offload->state & OFFLOAD_FIN_BOTH) == OFFLOAD_FIN_BOTH &&
	       offload->state & OFFLOAD_FIN_ACK_BOTH;
}

/* Reports whether both sides were delivered, and the connection goes on. */
static __always_inline bool offload_is_open(const struct offload *offload)
{
	return offload && (offload->state & OFFLOAD_DELIVERED_BOTH) == OFFLOAD_DELIVERED_BOTH &&
	       !offload_is_ending(offload);
}

/* Sets the flow's state when both sides were delivered. Before, it is FLOW_SYN_SENT or FLOW_UDP. */
static __always_inline void offload_set_state(struct offload *offload)
{
	if ((offload->state & OFFLOAD_DELIVERED_BOTH) != OFFLOAD_DELIVERED_BOTH)
		return;
	if (offload->flow_state == FLOW_UDP || offload->flow_state == FLOW_UDP_STREAM)
		offload->flow_state = FLOW_UDP_STREAM;
	else
		offload->flow_state =
			offload_is_ending(offload) ? FLOW_TIME_WAIT : FLOW_ESTABLISHED;
}

/* Has a value that differs between the two copies replace that in the table. */
#define OFFLOAD_MERGE(field)                                                                       \
	do {                                                                                       \
		if (now->field != before->field)                                                   \
			offload->field = now->field;                                               \
	} while (0)

/* The same for a sequence number, which moves forward only. */
#define OFFLOAD_MERGE_SEQ(field)                                                                   \
	do {                                                                                       \
		if (now->field != before->field &&                                                 \
		    (offload->field == before->field || (__s32)(now->field - offload->field) > 0)) \
			offload->field = now->field;                                               \
	} while (0)

/* Merges what has changed into the flow, because another CPU may change it, too. */
static __always_inline void offload_merge(struct offload *offload, const struct offload *now,
					  const struct offload *before)
{
	OFFLOAD_MERGE_SEQ(ct_acked[0]);
	OFFLOAD_MERGE_SEQ(ct_acked[1]);
	OFFLOAD_MERGE_SEQ(ct_ack[0]);
	OFFLOAD_MERGE_SEQ(ct_ack[1]);
	OFFLOAD_MERGE(ct_seen);
	OFFLOAD_MERGE(slow[0]);
	OFFLOAD_MERGE(slow[1]);
	OFFLOAD_MERGE(fin_seq[0]);
	OFFLOAD_MERGE(fin_seq[1]);
	OFFLOAD_MERGE(ct_window);
	OFFLOAD_MERGE(uplink);
	OFFLOAD_MERGE(moves);
	offload->state |= now->state & ~before->state;
	offload_set_state(offload);
}

/*
 * Writes what has changed in the copy of the flow that flow_access has found. Returns false if the
 * connection has another flow now.
 */
__noinline int offload_update(void)
{
	struct offload_copy *copy = offload_scratch_get();
	struct flow_args *args = flow_scratch_get();
	struct flow_bucket *bucket;
	struct flow_entry *entry;
	bool same;

	if (!copy || !args)
		return false;
	bucket = flow_bucket_of(args);
	entry = flow_entry_at(args, args->way);
	if (!bucket || !entry)
		return false;
	bpf_spin_lock(&bucket->lock);
	same = flow_has_key(bucket, entry, args) && entry->offload.payer == copy->now.payer &&
	       entry->offload.uplink == copy->before.uplink;
	if (same)
		offload_merge(&entry->offload, &copy->now, &copy->before);
	bpf_spin_unlock(&bucket->lock);
	return same;
}

/*
 * Writes the new flow in args, without which the connection goes by the stack. If no place is left, counts the packet;
 * the connection's next one tries again.
 */
static __always_inline void offload_insert(struct __sk_buff *skb, const struct flow_args *args)
{
	if (!flow_insert() && args->way >= FLOW_WAYS)
		drop_for(skb, args->new.owner, REASON_NO_OFFLOAD);
}

/*
 * Writes the copy back, if it has changed. If the flow that was copied is gone or has moved to another uplink meanwhile, nothing is
 * written.
 */
static __always_inline void offload_save(struct __sk_buff *skb, const struct connection *c)
{
	struct offload_copy *copy = offload_scratch_get();
	struct flow_args *args = flow_scratch_get();

	if (!c->offload || !copy || !args ||
	    !__builtin_memcmp(&copy->now, &copy->before, sizeof(copy->now)))
		return;
	args->key = c->key;
	flow_access(FLOW_READ);
	if (offload_update() || copy->before.payer)
		return;
	args->new = *(struct flow *)&copy->now;
	offload_insert(skb, args);
}

/* Removes the connection's flow. */
static __always_inline void offload_remove(struct connection *c)
{
	struct flow_args *args = flow_scratch_get();

	c->offload = NULL;
	if (!args)
		return;
	args->key = c->key;
	if (flow_access(FLOW_READ))
		flow_remove();
}

/* Records that the stack has delivered a packet of the side. With both, the flow is assured. */
static __always_inline void offload_deliver(const struct connection *c, __u32 side)
{
	struct offload *offload = c->offload;

	offload->state |= OFFLOAD_DELIVERED << side;
	offload_set_state(offload);
}
