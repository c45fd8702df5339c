/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * flow_table: an array of buckets, in place of a hash map of the kernel, which evicts the entry
 * that has been idle longest, whosever it is. README.md has the rules of replacement: a container gets a free place only while
 * it has fewer than FLOW_SHARE places in the bucket for each free one, and the last FLOW_SPARE places only if it has none; an
 * offload leaves FLOW_ROOM - 1 places. Of 16 places, one container gets at most 12, and then others 2, 1, and 1.
 *
 * So containers that flood the table (test/bench/FIGURES.md) take no assured flow from others. One gets three quarters of the
 * places, eight at once 94 %: then of 200 connections others open all to the outside, and the outside 131 to a host port,
 * which cannot choose its bucket.
 *
 * A flow has the tuple of the packets that it translates: FLOW_SNAT of replies, for which packets from the container probe its
 * candidate ports (masq.h); FLOW_DNAT of the container's replies, which packets to a host port get by the port's entry. Both
 * directions of FLOW_OFFLOAD and FLOW_PAIR have the same key.
 *
 * An offloaded connection has two flows: FLOW_OFFLOAD for the stack's side, which knows its own tuple only, and that which
 * translates it for the outside. In one, all flows would take 40 bytes more for what only long connections need, and
 * from_container would have to look for the port of masquerading before it knows whether the connection is offloaded.
 *
 * Locking: one lock per bucket.
 *  - A place is read, filled, and emptied under the lock, after its key has been compared. Readers
 *    take a copy, in flow_scratch. So no packet is translated by half of a flow.
 *  - Ids are unique in a bucket, and each key has one bucket, so a flow is in one place.
 *  - The verifier forbids function calls under a lock. So a place is chosen before: without the lock
 *    for ids and for what is replaced, which are then compared again.
 * The locks order memory on every architecture.
 */
#pragma once

#include "endpoint.h"
#include "flow_state.h"
#include "hash.h"
#include "moved.h"
#include "port_mark.h"
#include "scratch.h"

#define FLOW_SHARE 3
#define FLOW_SPARE 2
#define FLOW_ROOM  (FLOW_WAYS / (FLOW_SHARE + 1)) /* with more free places, no share is too large */

/* The flow of a packet to a container. */
struct dnat {
	struct flow_key key; /* if there is none: a free one */
	bool free;	     /* the key is free */
};

/* A flow to find, to update, or to create: the arguments of the functions here. */
struct flow_args {
	struct flow_key key;
	struct flow flow; /* the one that was found */
	struct flow new;
	__u32 access;  /* enum flow_access of dnat_find */
	bool tracked;  /* the packet has updated the flow */
	bool direct;   /* FLOW_DNAT, FLOW_SENT: a flow that translates nothing, not one that does */
	__u64 version; /* of the flow to replace */
	__u32 replaced; /* its id; 0: the place is free */
	__u32 known;	/* where the next lookup may find the flow: flow_place_of; 0: not known */
	__u32 bucket;	/* of the key */
	__u32 id;
	struct flow_key hashed; /* the tuple of hash */
	__u64 hash;
	__u32 way; /* or FLOW_WAYS. Not in a register, where the verifier would follow each value. */
	__u32 now;
	__u64 free_version; /* as version and replaced, for free_way */
	__u32 free_id;
	__u32 free; /* number of free places in the bucket, or with useless flows, and one of them */
	__u32 free_way;
	__u32 keep;	  /* id of a flow that must not be replaced; 0: none */
	__u32 own;	  /* number of the payer's flows in the bucket */
	__u32 others;	  /* number of others' flows that are not assured */
	__u32 weight;	  /* of the flow to replace */
	struct dnat dnat; /* of host_port_forward */
};

/* The weight of another container's flow is how long it has been idle, that of an own one is this more. */
#define FLOW_OWN (1U << 30)

SCRATCH(flow_scratch, struct flow_args);

/*
 * Reports whether the flow's container still exists. DEL does not remove flows: it would have
 * to read all of them, and would miss those that packets add meanwhile. The container is
 * behind nat_addr; for host ports and hairpin clients it is another side.
 */
static __always_inline bool flow_owner_is_alive(const struct flow_key *key, const struct flow *flow)
{
	return flow->owner == OWNER_HOST || endpoint_is_owned_by(&flow->nat_addr, flow->owner) ||
	       endpoint_is_owned_by(&key->remote, flow->owner) ||
	       endpoint_is_owned_by(&key->local, flow->owner);
}

/* Reports whether two keys are the same but for their kind. */
static __always_inline bool flow_tuple_equal(const struct flow_key *a, const struct flow_key *b)
{
	return *(const __u32 *)&a->remote_port == *(const __u32 *)&b->remote_port &&
	       a->protocol == b->protocol && addr_equal(&a->remote, &b->remote) &&
	       addr_equal(&a->local, &b->local);
}

/* Returns the bucket of the key in args. NULL only for the verifier. */
static __always_inline struct flow_bucket *flow_bucket_of(const struct flow_args *args)
{
	return bpf_map_lookup_elem(&flow_buckets, &args->bucket);
}

/* Returns the place at a way of the bucket of args. NULL only for the verifier. */
static __always_inline struct flow_entry *flow_entry_at(const struct flow_args *args, __u32 way)
{
	__u32 place = args->bucket * FLOW_WAYS + way % FLOW_WAYS;

	return bpf_map_lookup_elem(&flow_table, &place);
}

/* Reports whether the place in args has its key. The caller holds the lock. */
static __always_inline bool flow_has_key(const struct flow_bucket *bucket,
					 const struct flow_entry *entry,
					 const struct flow_args *args)
{
	return bucket->id[args->way % FLOW_WAYS] == args->id && entry->key.kind == args->key.kind &&
	       flow_tuple_equal(&entry->key, &args->key);
}

/* Reports whether two flows with one key are the same connection. */
static __always_inline bool flow_is_same(const struct flow *a, const struct flow *b)
{
	return a->nat_port == b->nat_port && a->owner == b->owner &&
	       a->remote_port == b->remote_port && addr_equal(&a->nat_addr, &b->nat_addr);
}

/* Returns the place in args, which has a flow, plus 1. */
static __always_inline __u32 flow_place_of(const struct flow_args *args)
{
	return args->bucket * FLOW_WAYS + args->way + 1;
}

/* Sets the place in args to the known one, which saves the hash. Returns false if it is empty. */
static __always_inline bool flow_find_known(struct flow_args *args)
{
	__u32 place = args->known - 1;
	struct flow_bucket *bucket;

	args->known = 0;
	args->bucket = place / FLOW_WAYS;
	args->way = place % FLOW_WAYS;
	bucket = flow_bucket_of(args);
	args->id = bucket ? bucket->id[args->way % FLOW_WAYS] : 0;
	return args->id;
}

/*
 * Sets the bucket of the key in args, and its place, if it has one. The hash is that of the tuple, which
 * several hooks look up for one packet; the kind changes the id.
 */
static __always_inline void flow_find(struct flow_args *args)
{
	const struct flow_key *key = &args->key;
	struct flow_bucket *bucket;

	if (args->known && flow_find_known(args))
		return;
	if (!flow_tuple_equal(key, &args->hashed)) {
		args->hashed = *key;
		args->hash = siphash_of(&key->remote, &key->local,
					(__u64)key->remote_port << 32 |
						(__u32)key->local_port << 16 | key->protocol);
	}
	args->bucket = (args->hash & 0xffffffff) * config.flow_buckets >> 32;
	args->id = ((args->hash >> 32) + key->kind * GOLDEN) | 1;
	args->way = FLOW_WAYS;
	bucket = flow_bucket_of(args);
	if (!bucket)
		return;
	for (__u32 way = 0; way < FLOW_WAYS; way++)
		if (bucket->id[way] == args->id)
			args->way = way;
}

/* Reports whether a flow of another kind may have the tuple of the key in args, which has been looked up. */
static __always_inline bool flow_may_have(const struct flow_args *args, enum flow_kind kind)
{
	__u32 id = ((args->hash >> 32) + kind * GOLDEN) | 1;
	struct flow_bucket *bucket = flow_bucket_of(args);
	bool found = false;

	if (!bucket)
		return false;
	for (__u32 way = 0; way < FLOW_WAYS; way++)
		found |= bucket->id[way] == id;
	return found;
}

/* Records what follows from p, by which the flow in args is updated; args->flow is how it was before. */
static __always_inline void flow_tracked(const struct flow_args *args, struct packet *p,
					 enum sender sender, __u32 now)
{
	if ((sender == FROM_CONTAINER) != flow_opened_by_container(&args->key, &args->flow) &&
	    !(args->flow.flags & FLOW_REPLIED))
		p->decided.first = p->protocol == IPPROTO_UDP;
	moved_record_flow(&args->key, &args->flow, now);
}

/* How flow_access uses the flow that it finds. */
enum flow_access {
	FLOW_READ,     /* copies it */
	FLOW_SENT,     /* updates it, too, by a packet that the container has sent */
	FLOW_RECEIVED, /* the same for one received from an uplink, if nothing has to be asked before */
};

/* Reports whether the FLOW_DNAT translates nothing: the remote has a route to the container. */
static __always_inline bool flow_is_direct(const struct flow_key *key, const struct flow *flow)
{
	return flow->nat_port == key->local_port && addr_equal(&flow->nat_addr, &key->local);
}

/*
 * Reports whether p may update the flow. args->new has whose it must be, and what it must translate. That need not be known of a
 * masqueraded flow that receives p; and owner 0 is that of a cached decision, whose policies have been compared (policy_pair.h).
 * The caller holds the lock.
 */
static __always_inline bool flow_takes(const struct flow *flow, const struct flow_args *args,
				       const struct packet *p, __u32 access, __u32 now)
{
	bool masqueraded = args->key.kind == FLOW_SNAT;

	if (args->key.kind == FLOW_PAIR)
		return !flow_expired_at(flow, now) &&
		       (!args->new.owner ||
			((flow->owner ^ flow->payer) == args->new.owner &&
			 flow->policy_generation == args->new.policy_generation));
	if (args->key.kind == FLOW_POLICY)
		return flow->owner == args->new.owner && !flow_expired_at(flow, now) &&
		       flow->policy_generation == args->new.policy_generation;
	if (access == FLOW_SENT)
		return masqueraded
			       ? flow_is_same(flow, &args->new)
			       : flow->owner == args->new.owner && !flow_expired_at(flow, now) &&
					 flow_is_direct(&args->key, flow) == args->direct;
	if (flow_expired_at(flow, now) || (flow->uplink && flow->uplink != p->ifindex))
		return false;
	if (masqueraded)
		return flow->flags & FLOW_REPLIED || flow->created == (__u16)now;
	return flow->flags & FLOW_REPLIED && !flow_ended(flow) && flow_is_same(flow, &args->new);
}

/*
 * Finds the flow with the key in flow_scratch, copies it, and then updates it by the packet in
 * pkt_scratch, as access says, under one lock. Returns false if there is none, and for FLOW_SENT if it is
 * not that of args->new.
 */
__noinline int flow_access(__u32 access)
{
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	bool found, takes = false, track;
	struct flow_bucket *bucket;
	struct flow_entry *entry;
	__u32 now;

	if (!args || !p)
		return false;
	args->tracked = false;
	flow_find(args);
	if (args->way >= FLOW_WAYS)
		return false;
	bucket = flow_bucket_of(args);
	entry = flow_entry_at(args, args->way);
	if (!bucket || !entry)
		return false;
	track = access != FLOW_READ && !p->icmp_error && !p->decided.ct_update &&
		(access == FLOW_SENT || p->decided.end_expected ||
		 !(packet_opens(p) || p->tcp_fin || p->tcp_rst));
	now = access == FLOW_READ ? 0 : now_ticks();
	bpf_spin_lock(&bucket->lock);
	found = flow_has_key(bucket, entry, args);
	if (found) {
		args->flow = entry->flow;
		takes = access != FLOW_READ && flow_takes(&entry->flow, args, p, access, now);
		if (takes && track && access == FLOW_SENT)
			flow_update(&entry->flow, &args->key, p, FROM_CONTAINER, now);
		else if (takes && track)
			flow_update(&entry->flow, &args->key, p, FROM_REMOTE, now);
	}
	bpf_spin_unlock(&bucket->lock);
	if (!found)
		args->way = FLOW_WAYS;
	args->tracked = takes && track;
	if (args->tracked)
		flow_tracked(args, p, access == FLOW_SENT ? FROM_CONTAINER : FROM_REMOTE, now);
	return access == FLOW_SENT ? takes : found;
}

/* Returns a copy of the flow with the key in args, or NULL. It is valid until the next lookup. */
static __always_inline struct flow *flow_lookup(struct flow_args *args)
{
	return flow_access(FLOW_READ) ? &args->flow : NULL;
}

/*
 * Updates the flow that flow_access has found by the packet in pkt_scratch, unless another one has
 * replaced it.
 */
__noinline int flow_track(__u32 sender)
{
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct flow_bucket *bucket;
	struct flow_entry *entry;
	__u32 now = now_ticks();
	bool same;

	if (!args || !p || p->icmp_error || p->decided.ct_update)
		return 0;
	bucket = flow_bucket_of(args);
	entry = flow_entry_at(args, args->way);
	if (!bucket || !entry)
		return 0;
	bpf_spin_lock(&bucket->lock);
	same = flow_has_key(bucket, entry, args) && flow_is_same(&entry->flow, &args->flow);
	if (same)
		flow_update(&entry->flow, &args->key, p, sender, now);
	bpf_spin_unlock(&bucket->lock);
	if (same)
		flow_tracked(args, p, sender, now);
	return 0;
}

/* Returns what changes whenever a flow gets a packet that matters for its replacement. */
static __always_inline __u64 flow_version(const struct flow *flow)
{
	_Static_assert(offsetof(struct flow, flags) == offsetof(struct flow, last_seen) + 7,
		       "last_seen, nat_port, state, flags");
	return *(const __u64 *)&flow->last_seen;
}

/* Weighs whether the new flow in flow_scratch may replace the flow at the way of its bucket. */
__noinline int flow_weigh(__u32 way)
{
	struct flow_args *args = flow_scratch_get();
	struct flow_bucket *bucket = args ? flow_bucket_of(args) : NULL;
	struct flow_entry *entry;
	__u32 weight, idle;
	__u64 version;
	bool own;

	if (!args || !bucket || way >= FLOW_WAYS || !bucket->id[way] ||
	    bucket->id[way] == args->keep)
		return 0;
	entry = flow_entry_at(args, way);
	if (!entry)
		return 0;
	version = flow_version(&entry->flow);
	own = entry->flow.payer == args->new.payer;
	if (flow_expired_at(&entry->flow, args->now) ||
	    (!own && !flow_owner_is_alive(&entry->key, &entry->flow))) {
		args->free++;
		args->free_way = way;
		args->free_id = bucket->id[way];
		args->free_version = version;
		return 0;
	}
	args->own += own;
	if (flow_is_assured(&entry->flow))
		return 0;
	args->others += !own;
	idle = args->now - entry->flow.last_seen;
	weight = (own ? FLOW_OWN : 1) + ((__s32)idle < 0 ? 0 : idle);
	if (weight <= args->weight)
		return 0;
	args->weight = weight;
	args->way = way;
	args->version = version;
	args->replaced = bucket->id[way];
	return 0;
}

/* Reports whether the new flow in args may take one of that many places of its bucket. */
static __always_inline bool flow_may_have_one_of(const struct flow_args *args, __u32 places)
{
	if (args->own >= FLOW_SHARE * places)
		return false;
	/* The connection works without. */
	if (args->key.kind == FLOW_OFFLOAD || args->key.kind == FLOW_CT_NAT)
		return places >= FLOW_ROOM;
	return places > FLOW_SPARE || !args->own;
}

/* Chooses a place for the new flow in args. Returns false if its bucket has none. */
static __always_inline bool flow_choose_place(struct flow_args *args,
					      const struct flow_bucket *bucket)
{
	args->free = 0;
	args->free_id = 0;
	args->own = 0;
	args->others = 0;
	args->weight = 0;
	for (__u32 way = 0; way < FLOW_WAYS; way++) {
		if (bucket->id[way])
			continue;
		args->free++;
		args->free_way = way;
	}
	if (args->free <= FLOW_ROOM)
		for (__u32 way = 0; way < FLOW_WAYS; way++)
			flow_weigh(way);
	if (flow_may_have_one_of(args, args->free)) {
		args->way = args->free_way;
		args->replaced = args->free_id;
		args->version = args->free_version;
		return true;
	}
	if (!args->weight)
		return false;
	return args->weight >= FLOW_OWN ||
	       (args->own < FLOW_WAYS / 2 && flow_may_have_one_of(args, args->free + args->others));
}

/* Reports whether the place in args is still as it was when it was chosen. The caller holds the lock. */
static __always_inline bool flow_place_is_unchanged(const struct flow_bucket *bucket,
						    const struct flow_entry *entry,
						    const struct flow_args *args)
{
	for (__u32 way = 0; way < FLOW_WAYS; way++)
		if (bucket->id[way] == args->id && way != args->way)
			return false; /* another CPU has added the key */
	return bucket->id[args->way % FLOW_WAYS] == args->replaced &&
	       (!args->replaced || flow_version(&entry->flow) == args->version);
}

/*
 * Writes the new flow in flow_scratch under the key for which flow_access has looked, in place of
 * the flow that it has found. Returns false if another CPU has changed the place meanwhile, or, with the
 * way FLOW_WAYS, if no place is left.
 */
__noinline int flow_insert(void)
{
	struct flow_args *args = flow_scratch_get();
	struct flow_bucket *bucket;
	struct flow_entry *entry;
	bool unchanged;

	if (!args)
		return false;
	bucket = flow_bucket_of(args);
	if (!bucket)
		return false;
	if (args->key.kind == FLOW_DNAT)
		port_set_mark(PORT_REPLIES, args->key.protocol, args->key.local_port);
	if (!args->new.payer)
		args->new.payer = args->new.owner;
	args->now = now_ticks();
	args->replaced = args->id;
	args->version = flow_version(&args->flow);
	if (args->way >= FLOW_WAYS && !flow_choose_place(args, bucket)) {
		args->way = FLOW_WAYS;
		return false;
	}
	entry = flow_entry_at(args, args->way);
	if (!entry)
		return false;
	bpf_spin_lock(&bucket->lock);
	unchanged = flow_place_is_unchanged(bucket, entry, args);
	if (unchanged) {
		entry->key = args->key;
		entry->flow = args->new;
		bucket->id[args->way % FLOW_WAYS] = args->id;
	}
	bpf_spin_unlock(&bucket->lock);
	return unchanged;
}

/* Removes the flow that flow_access has found. */
__noinline int flow_remove(void)
{
	struct flow_args *args = flow_scratch_get();
	struct flow_bucket *bucket;
	struct flow_entry *entry;

	if (!args)
		return 0;
	bucket = flow_bucket_of(args);
	entry = flow_entry_at(args, args->way);
	if (!bucket || !entry)
		return 0;
	bpf_spin_lock(&bucket->lock);
	if (flow_has_key(bucket, entry, args) && flow_is_same(&entry->flow, &args->flow))
		bucket->id[args->way % FLOW_WAYS] = 0;
	bpf_spin_unlock(&bucket->lock);
	return 0;
}
