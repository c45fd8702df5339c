/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The ports for masquerading, and the candidates of a flow among them. */
#pragma once

#include "hash.h"
#include "port_mark.h"
#include "scratch.h"

#define MASQ_PORTS (config.masq_ports[0].count + config.masq_ports[1].count)
#define MASQ_GROUP 4

/* A masqueraded flow to find or to create: the arguments of masq.h's functions. */
struct masq_args {
	struct flow_key key; /* local_port: the result */
	struct flow flow;
	__u32 hash;  /* of the tuple without the container's port, with the host's secret */
	__u32 share; /* chooses the ports that the container may use towards the remote */
	__u32 ended; /* a candidate whose flow has ended */
	bool ipv6;
	bool has_ports;
	bool read_only;		     /* the flow is only searched for, not updated */
	bool has_former;	     /* the uplink has had another source */
	struct masq_sources sources; /* an entry for masq_sources */
	struct fwd_key tuple;	     /* of another packet, or a key of route_cache.h */
};

_Static_assert(__builtin_offsetof(struct masq_args, tuple) % sizeof(__u64) == 0, "fwd_key_equal");

SCRATCH(masq_scratch, struct masq_args);

static __always_inline bool port_range_has(const volatile struct port_range *range, __u16 port)
{
	return (__u16)(port - range->first) < range->count;
}

static __always_inline bool masq_in_range(__u16 port)
{
	return port_range_has(&config.masq_ports[0], port) ||
	       port_range_has(&config.masq_ports[1], port);
}

/* Reports whether the port may be that of a masqueraded flow or of a host port. */
static __always_inline bool port_may_be_ours(const struct packet *p, __u16 port)
{
	return !p->has_ports || masq_in_range(port) || is_host_port_number(p->protocol, port);
}

/*
 * Describes the tuple's flow, of owner, which gets source. A client of several host
 * ports of one container has a flow for each: via represents the host port, else it is 0.
 */
static __always_inline void masq_init(struct masq_args *args, const struct fwd_key *tuple,
				      const struct addr *source, __u64 owner, __u16 via)
{
	__u64 word = (__u64)via << 32 | (__u32)tuple->dport << 16 | tuple->protocol;
	__u64 hash = hash_secret(&tuple->src, &tuple->dst, word);

	flow_sent_key(&args->key, tuple, FLOW_SNAT);
	args->key.local = *source;
	__builtin_memset(&args->flow, 0, sizeof(args->flow));
	args->flow.owner = owner;
	args->flow.nat_addr = tuple->src;
	args->flow.nat_port = tuple->sport;
	args->flow.remote_port = via;
	args->hash = hash;
	args->share = hash >> 32;
	args->ipv6 = tuple->ipv6;
	args->has_ports = tuple->has_ports;
	args->read_only = false;
}

/*
 * Candidate i: the container's port plus an offset given by the hash and i, modulo
 * the number of ports (RFC 6056, 3.3.3). So a container's flows to one remote have
 * different first candidates, up to 25,000 by default. One port of each MASQ_GROUP is no
 * candidate of the container towards the remote.
 * The choice is hashed twice: with a single multiplication it would correlate with the
 * candidates, and for some secrets no ports would be left to others.
 */
static __always_inline __u16 masq_candidate(const struct masq_args *args, __u32 i)
{
	__u32 moved = (hash_mix(args->hash, i) & 0xffffff) + args->flow.nat_port;
	__u32 groups = MASQ_PORTS / MASQ_GROUP, index, group, place, missed;

	if (groups) {
		index = moved % (groups * (MASQ_GROUP - 1));
		group = index / (MASQ_GROUP - 1);
		place = index % (MASQ_GROUP - 1);
		missed = hash_mix(hash_mix(args->share, group), group);
		place += place >= (missed >> 16) % MASQ_GROUP;
		index = group * MASQ_GROUP + place;
	} else {
		index = moved % MASQ_PORTS;
	}
	if (index < config.masq_ports[0].count)
		return config.masq_ports[0].first + index;
	return config.masq_ports[1].first + index - config.masq_ports[0].count;
}

/* Puts candidate i into the key in masq_scratch. */
__noinline int masq_set_candidate(__u32 i)
{
	struct masq_args *args = masq_scratch_get();

	if (args)
		args->key.local_port =
			args->has_ports ? masq_candidate(args, i) : args->flow.nat_port;
	return 0;
}
