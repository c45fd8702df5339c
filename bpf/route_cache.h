/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Answers of the routing tables about an address, which hold as long as a cached decision. They are
 * entries of fwd_cache, under keys that no packet has. Rules may ask for the source and the protocol,
 * which are in the keys. A host with rules that ask for more gets no answer from here.
 */
#pragma once

#include "fib.h"
#include "fwd_entry.h"
#include "masq_port.h"

/* What is asked: in the key, in place of a protocol that fwd_cache has. */
enum route_question {
	ROUTE_SOURCE = 1,  /* the host's source for packets to the address by the device */
	ROUTE_REVERSE = 2, /* whether packets to the address leave by the device */
	ROUTE_AWAY = 3,	   /* whether packets from the device to the address leave the host */
	ROUTE_LOCAL = 4,   /* whether the host has the address */
	ROUTE_EXIT = 5,	   /* enum exit of packets from the device to the address */
};

static __always_inline bool route_has_rules(bool ipv6)
{
	__u32 family = ipv6, *rules = bpf_map_lookup_elem(&route_rules, &family);

	return !rules || *rules;
}

/*
 * Returns the key of a question about p, which is valid until the next question. NULL only for the
 * verifier.
 */
static __always_inline const struct fwd_key *route_key(enum route_question question,
						       const struct packet *p, __u32 ifindex)
{
	struct masq_args *args = masq_scratch_get();
	struct fwd_key *key;

	if (!args)
		return NULL;
	key = &args->tuple;
	__builtin_memset(key, 0, sizeof(*key));
	key->dst = question == ROUTE_REVERSE ? p->src : p->dst;
	if (question == ROUTE_SOURCE || question == ROUTE_AWAY || question == ROUTE_EXIT) {
		key->src = p->src;
		key->sport = p->protocol;
	}
	key->ifindex = ifindex;
	key->protocol = question;
	key->ipv6 = p->ipv6;
	return key;
}

/* Returns the answer, or NULL. */
static __always_inline struct fwd_entry *route_lookup(const struct fwd_key *key)
{
	struct fwd_entry *entry = fwd_cache_lookup(key, tuple_id(key));

	return entry && fwd_entry_is_current(entry) && !route_has_rules(key->ipv6) ? entry : NULL;
}

/*
 * Stores an answer about p, and returns its entry. The generation is from before the lookup: the answer does not outlive a
 * change meanwhile. NULL only for the verifier.
 */
static __always_inline struct fwd_entry *route_store(const struct packet *p,
						     const struct fwd_key *key, __u8 answer)
{
	struct fwd_entry *entry = fwd_cache_place(tuple_id(key));

	if (!entry)
		return NULL;
	entry->key = *key;
	entry->action = FWD_ROUTE;
	entry->updated = bpf_jiffies64();
	entry->generation = p->decided.generation;
	entry->flags = 0;
	entry->budget = answer;
	return entry;
}

/* Answers a question about the packet in pkt_scratch, other than that for the source: a bool, or enum exit. */
__noinline int route_ask(struct __sk_buff *skb, __u32 question)
{
	struct packet *p = pkt_scratch_get();
	const struct fwd_key *key;
	struct fwd_entry *entry;
	__u8 answer;

	if (!p)
		return false;
	key = route_key(question, p, skb->ifindex);
	if (!key)
		return false;
	entry = route_lookup(key);
	if (entry)
		return entry->budget;
	if (question == ROUTE_REVERSE)
		answer = fib_reverse_path(skb, p);
	else if (question == ROUTE_EXIT)
		answer = fib_exit(skb, p);
	else
		answer = question == ROUTE_AWAY ? fib_leads_away(skb, p) : fib_is_local(skb, p);
	route_store(p, key, answer);
	return answer;
}
