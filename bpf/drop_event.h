/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Single drops, reported while there is a reader: `ebpfnetctl drops --follow`. */
#pragma once

#include "endpoint.h"

#define DROP_SECOND 1000000000ULL /* in ns */

static __always_inline struct drop_reader *drop_reader_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&drop_reader, &zero);
}

/* Reports whether the lease of the reader is valid. Removes an expired one. */
static __always_inline bool drop_reader_lives(struct drop_reader *reader, __u64 now)
{
	if (now < reader->until)
		return true;
	reader->until = 0;
	return false;
}

static __always_inline bool drop_reader_has(const struct drop_reader *reader, __u64 owner)
{
	for (int i = 0; i < DROP_OWNERS; i++) {
		if (owner && reader->owner[i] == owner)
			return true;
	}
	return false;
}

static __always_inline bool drop_reader_has_addr(const struct drop_reader *reader,
						 const struct addr *addr)
{
	const struct endpoint *endpoint = endpoint_lookup(addr);

	return endpoint && drop_reader_has(reader, endpoint->owner);
}

/* Reports whether the reader's filter has a packet of owner, or between the two addresses. */
static __always_inline bool drop_reader_wants(const struct drop_reader *reader, __u64 owner,
					      const struct addr *src, const struct addr *dst)
{
	return !reader->owner[0] || drop_reader_has(reader, owner) ||
	       drop_reader_has_addr(reader, src) || drop_reader_has_addr(reader, dst);
}

/*
 * Reserves an event, or counts it as left out and returns NULL. So a slow reader or a flood of
 * drops costs little more than the counter. The reader polls, so nobody wakes it.
 */
static __always_inline struct drop_event *drop_event_new(const struct drop_reader *reader,
							 __u32 reason, __u64 now)
{
	struct drop_limit *limit = bpf_map_lookup_elem(&drop_limits, &reason);
	struct drop_event *event = NULL;

	if (!limit)
		return NULL;
	if (now - limit->began >= DROP_SECOND) {
		limit->began = now;
		limit->events = 0;
	}
	if (limit->events++ < reader->limit)
		event = bpf_ringbuf_reserve(&drop_events, sizeof(*event), 0);
	if (!event) {
		limit->left_out++;
		return NULL;
	}
	event->time = now;
	return event;
}

/*
 * Marks that the stack drops the packet after us, so that its tracepoint (stack_drops.c)
 * ignores it.
 */
static __always_inline void drop_mark_ours(__u64 now)
{
	__u32 key = DROP_STACK;
	struct drop_limit *limit = bpf_map_lookup_elem(&drop_limits, &key);

	if (limit)
		limit->ours = now;
}
