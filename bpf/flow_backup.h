/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * flows_backup: copies of flows that must survive a flood. An LRU map evicts
 * the entry that has been idle longest. Here, a new entry takes only a free place, or
 * replaces one of the same owner in its bucket.
 */
#pragma once

#include "endpoint.h"
#include "hash.h"
#include "scratch.h"
#include "time.h"

static __always_inline bool flow_expired(const struct flow *flow)
{
	__u32 idle = now_ticks() - flow->last_seen, state = flow->state;

	if ((__s32)idle < 0) /* another CPU is a tick ahead */
		return false;
	asm volatile("" : "+r"(state));
	return state >= FLOW_STATES || idle > config.timeout[state];
}

/* Reports whether the flow needs a copy: its sides may be silent for long, and continue then. */
static __always_inline bool flow_is_assured(const struct flow *flow)
{
	return (flow->state >= FLOW_ESTABLISHED && flow->state <= FLOW_CLOSE_WAIT) ||
	       flow->state == FLOW_UDP_STREAM;
}

/* Reports whether both sides have ended the connection. */
static __always_inline bool flow_ended(const struct flow *flow)
{
	return flow->state >= FLOW_LAST_ACK && flow->state <= FLOW_CLOSE;
}

/* Reports whether both sides have sent, and the flow has neither ended nor expired. */
static __always_inline bool flow_is_live(const struct flow *flow)
{
	return flow->flags & FLOW_REPLIED && !flow_expired(flow) && !flow_ended(flow);
}

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

static __always_inline bool flow_key_equal(const struct flow_key *a, const struct flow_key *b)
{
	return *(const __u32 *)&a->remote_port == *(const __u32 *)&b->remote_port &&
	       a->protocol == b->protocol && a->kind == b->kind &&
	       addr_equal(&a->remote, &b->remote) && addr_equal(&a->local, &b->local);
}

/* Finds the bucket of the key in backup_scratch. */
__noinline int backup_find_bucket(void)
{
	struct backup_args *args = backup_scratch_get();
	__u64 hash;

	if (!args)
		return 0;
	hash = hash_secret(&args->key.remote, &args->key.local,
			   (__u64)args->key.remote_port << 32 | (__u32)args->key.local_port << 16 |
				   args->key.protocol << 8 | args->key.kind);
	args->bucket = (__u32)hash % config.backup_buckets;
	args->id = hash >> 32 | 1;
	return 0;
}

/*
 * Returns the arguments of backup_read and backup_write. NULL only for the verifier. They get
 * no pointer to the key, because Linux 7 would lose track of it.
 */
static __always_inline struct backup_args *backup_args_init(const struct flow_key *key)
{
	struct backup_args *args = backup_scratch_get();

	if (args) {
		args->key = *key;
		backup_find_bucket();
	}
	return args;
}

static __always_inline bool backup_has(const struct flow_backup *backup, const struct flow_key *key)
{
	return backup->used && flow_key_equal(&backup->key, key);
}

/* NULL only for the verifier. */
static __always_inline struct backup_ids *backup_ids_lookup(const struct backup_args *args)
{
	return bpf_map_lookup_elem(&backup_ids, &args->bucket);
}

/* The place of the way in args, or NULL. */
static __always_inline struct flow_backup *backup_at(const struct backup_args *args)
{
	__u32 place = args->bucket * BACKUP_WAYS + args->way;

	return args->way < BACKUP_WAYS ? bpf_map_lookup_elem(&flows_backup, &place) : NULL;
}

/* Finds the key's place by its hash. Usually there is none, which one cache line shows. */
static __always_inline struct flow_backup *backup_lookup(struct backup_args *args,
							 const struct backup_ids *ids)
{
	struct flow_backup *backup;

	args->way = BACKUP_WAYS;
	for (__u32 way = 0; way < BACKUP_WAYS; way++)
		if (ids->id[way] == args->id)
			args->way = way;
	backup = backup_at(args);
	return backup && backup_has(backup, &args->key) ? backup : NULL;
}

/* Finds a place for a new entry. NULL: the bucket is full of other owners' entries. */
static __always_inline struct flow_backup *backup_place(struct backup_args *args,
							const struct backup_ids *ids)
{
	__u32 own = BACKUP_WAYS, longest = 0;

	args->way = BACKUP_WAYS;
	for (__u32 way = 0; way < BACKUP_WAYS; way++)
		if (!ids->id[way])
			args->way = way;
	if (args->way < BACKUP_WAYS)
		return backup_at(args);
	for (__u32 way = 0; way < BACKUP_WAYS; way++) {
		struct flow_backup *backup;
		__u32 idle;

		args->way = way;
		backup = backup_at(args);
		if (!backup)
			break;
		if (!backup->used || flow_expired(&backup->flow) ||
		    !flow_owner_is_alive(&backup->key, &backup->flow))
			return backup;
		idle = now_ticks() - backup->flow.last_seen;
		if (backup->flow.owner == args->flow.owner && idle >= longest) {
			longest = idle;
			own = way;
		}
	}
	args->way = own;
	return backup_at(args);
}

/* Writes the entry in backup_scratch. */
__noinline int backup_write(void)
{
	struct backup_args *args = backup_scratch_get();
	struct flow_backup *backup;
	struct backup_ids *ids;

	if (!args)
		return 0;
	ids = backup_ids_lookup(args);
	if (!ids)
		return 0;
	backup = backup_lookup(args, ids) ?: backup_place(args, ids);
	if (!backup)
		return 0;
	bpf_spin_lock(&backup->lock);
	backup->key = args->key;
	backup->flow = args->flow;
	backup->used = 1;
	ids->id[args->way % BACKUP_WAYS] = args->id;
	bpf_spin_unlock(&backup->lock);
	return 1;
}

/*
 * Reads the entry with the key in backup_scratch, and removes it if asked. Returns false if
 * there is none.
 */
__noinline int backup_read(__u32 remove)
{
	struct backup_args *args = backup_scratch_get();
	struct flow_backup *backup;
	struct backup_ids *ids;
	bool same;

	if (!args)
		return false;
	ids = backup_ids_lookup(args);
	if (!ids)
		return false;
	backup = backup_lookup(args, ids);
	if (!backup)
		return false;
	bpf_spin_lock(&backup->lock);
	same = backup_has(backup, &args->key);
	args->flow = backup->flow;
	if (same && remove) {
		backup->used = 0;
		ids->id[args->way % BACKUP_WAYS] = 0;
	}
	bpf_spin_unlock(&backup->lock);
	return same;
}

static __always_inline void backup_remove(const struct flow_key *key)
{
	if (backup_args_init(key))
		backup_read(true);
}

/* Removes an entry of flows and its copy. */
static __always_inline void flow_remove(const struct flow_key *key)
{
	bpf_map_delete_elem(&flows, key);
	if (is_tcp_or_udp(key->protocol))
		backup_remove(key);
}

static __always_inline void backup_store(const struct flow_key *key, const struct flow *flow)
{
	struct backup_args *args = backup_args_init(key);

	if (!args)
		return;
	args->flow = *flow;
	backup_write();
}

/* Restores an evicted entry of flows, or returns NULL. */
static __noinline struct flow *flow_recover(const struct flow_key *key)
{
	struct backup_args *args;

	if (!is_tcp_or_udp(key->protocol))
		return NULL;
	args = backup_args_init(key);
	if (!args || !backup_read(false))
		return NULL;
	/* Another CPU may have restored it already. */
	bpf_map_update_elem(&flows, key, &args->flow, BPF_NOEXIST);
	return bpf_map_lookup_elem(&flows, key);
}
