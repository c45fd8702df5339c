/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Predicates, conversions, and prefixes of addresses. */
#pragma once

#include <stdbool.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include "abi.h"

#define AF_INET	 2
#define AF_INET6 10

static __always_inline void addr_from_ipv4(struct addr *a, __be32 ipv4)
{
	__u32 *words = (__u32 *)a;

	words[0] = 0;
	words[1] = 0;
	words[2] = bpf_htonl(0xffff);
	words[3] = ipv4;
}

static __always_inline __be32 addr_ipv4(const struct addr *a)
{
	return ((const __u32 *)a)[3];
}

static __always_inline bool addr_equal(const struct addr *a, const struct addr *b)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3];
}

/* Returns the value for the longest prefix of addr in the set of the LPM map, or NULL. */
static __always_inline void *prefix_lookup(void *map, __u32 set, const struct addr *addr)
{
	struct prefix_key key = {.prefixlen = 32 + 128, .set = set, .addr = *addr};

	return bpf_map_lookup_elem(map, &key);
}

static __always_inline bool mac_equal(const __u8 *a, const __u8 *b)
{
	const __u16 *x = (const __u16 *)a, *y = (const __u16 *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

/* Reports whether the address is 01:80:c2:00:00:00 to :0f, which a bridge does not forward. */
static __always_inline bool mac_is_bridges(const __u8 *mac)
{
	const __u16 *words = (const __u16 *)mac;

	return words[0] == bpf_htons(0x0180) && words[1] == bpf_htons(0xc200) &&
	       (words[2] & bpf_htons(0xfff0)) == 0;
}

/* Reports whether a sorts before b, in an arbitrary but fixed order. */
static __always_inline bool addr_less(const struct addr *a, const struct addr *b)
{
	const __u32 *x = (const __u32 *)a, *y = (const __u32 *)b;

	for (int i = 3; i > 0; i--)
		if (x[i] != y[i])
			return x[i] < y[i];
	return x[0] < y[0];
}

static __always_inline bool addr_is_any(const struct addr *a, bool ipv6)
{
	const __u32 *words = (const __u32 *)a;

	return !words[3] && (!ipv6 || (!words[0] && !words[1] && !words[2]));
}

/* Reports whether the address is a mapped IPv4 address, invalid on a wire (RFC 4942, 2.2). */
static __always_inline bool addr_is_mapped(const struct addr *a)
{
	const __u32 *words = (const __u32 *)a;

	return !words[0] && !words[1] && words[2] == bpf_htonl(0xffff);
}

/*
 * Reports whether the address is loopback, which never crosses a wire (RFC 1122, 3.2.1.3; RFC
 * 4291, 2.5.3).
 */
static __always_inline bool addr_is_loopback(const struct addr *a, bool ipv6)
{
	const __u32 *words = (const __u32 *)a;

	if (!ipv6)
		return a->bytes[12] == 127;
	return !words[0] && !words[1] && !words[2] && words[3] == bpf_htonl(1);
}

/* Reports whether the address is link-local, multicast or broadcast: never translated. */
static __always_inline bool addr_is_link_scoped(const struct addr *a, bool ipv6)
{
	if (!ipv6)
		return a->bytes[12] >= 224 || (a->bytes[12] == 169 && a->bytes[13] == 254);
	return a->bytes[0] == 0xff || (a->bytes[0] == 0xfe && (a->bytes[1] & 0xc0) == 0x80);
}
