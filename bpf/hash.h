/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Hashes. Those that a container or remote must not predict are keyed with the host's secret. */
#pragma once

#include <linux/errno.h>

#include "addr.h"
#include "scratch.h"

#define GOLDEN 0x9e3779b1 /* 2^32 divided by the golden ratio: spreads neighbors far apart */

/* A quick hash, only as unpredictable as its first argument. */
static __always_inline __u32 hash_mix(__u32 hash, __u32 word)
{
	hash = (hash ^ word) * GOLDEN;
	return hash ^ hash >> 15;
}

struct siphash {
	__u64 v0, v1, v2, v3;
};

static __always_inline __u64 rotl64(__u64 x, int bits)
{
	return x << bits | x >> (64 - bits);
}

static __always_inline void siphash_round(struct siphash *s)
{
	s->v0 += s->v1;
	s->v1 = rotl64(s->v1, 13) ^ s->v0;
	s->v0 = rotl64(s->v0, 32);
	s->v2 += s->v3;
	s->v3 = rotl64(s->v3, 16) ^ s->v2;
	s->v0 += s->v3;
	s->v3 = rotl64(s->v3, 21) ^ s->v0;
	s->v2 += s->v1;
	s->v1 = rotl64(s->v1, 17) ^ s->v2;
	s->v2 = rotl64(s->v2, 32);
}

static __always_inline void siphash_word(struct siphash *s, __u64 word)
{
	s->v3 ^= word;
	siphash_round(s);
	s->v0 ^= word;
}

/*
 * SipHash-1-3 (Aumasson and Bernstein, 2012) of two addresses and a word, keyed with the host's
 * secret. IPv4 addresses fit one word.
 */
static __always_inline __u64 siphash_of(const struct addr *a, const struct addr *b, __u64 word)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)b;
	struct siphash s = {
		.v0 = config.secret[0] ^ 0x736f6d6570736575,
		.v1 = config.secret[1] ^ 0x646f72616e646f6d,
		.v2 = config.secret[0] ^ 0x6c7967656e657261,
		.v3 = config.secret[1] ^ 0x7465646279746573,
	};

	if (!addr_is_mapped(a) || !addr_is_mapped(b)) {
		siphash_word(&s, (__u64)x[0] << 32 | y[0]);
		siphash_word(&s, (__u64)x[1] << 32 | y[1]);
		siphash_word(&s, (__u64)x[2] << 32 | y[2]);
	}
	siphash_word(&s, (__u64)x[3] << 32 | y[3]);
	siphash_word(&s, word);
	s.v2 ^= 0xff;
	siphash_round(&s);
	siphash_round(&s);
	siphash_round(&s);
	return s.v0 ^ s.v1 ^ s.v2 ^ s.v3;
}

/* The arguments of siphash. */
struct hash_args {
	struct addr a;
	struct addr b;
	__u64 word; /* and the result */
};

SCRATCH(hash_scratch, struct hash_args);

/* Hashes what is in hash_scratch. */
__noinline int siphash(void)
{
	struct hash_args *args = hash_scratch_get();

	if (!args)
		return -EINVAL;
	args->word = siphash_of(&args->a, &args->b, args->word);
	return 0;
}

/* Returns a hash of two addresses and a word, keyed with the host's secret. */
static __always_inline __u64 hash_secret(const struct addr *a, const struct addr *b, __u64 word)
{
	struct hash_args *args = hash_scratch_get();

	if (!args)
		return 0;
	args->a = *a;
	args->b = *b;
	args->word = word;
	siphash();
	return args->word;
}
