/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Internet checksums (RFC 1071). */
#pragma once

#include <linux/bpf.h>
#include <linux/errno.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/*
 * A full IPv6 checksum from the NIC (CHECKSUM_COMPLETE) stays right when an
 * address and the L4 checksum change together, but kernels update it unless
 * instructed otherwise. The flag came with 6.16 and the stable series; older kernels
 * return EINVAL and change nothing.
 */
#define F_IPV6 (1ULL << 7) /* BPF_F_IPV6 */

static __always_inline long csum_replace_pseudo_ipv6(struct __sk_buff *skb, __u32 offset,
						     __s64 diff, __u64 flags)
{
	long err;

	flags |= BPF_F_PSEUDO_HDR;
	err = bpf_l4_csum_replace(skb, offset, 0, diff, flags | F_IPV6);
	if (err == -EINVAL)
		err = bpf_l4_csum_replace(skb, offset, 0, diff, flags);
	return err;
}

/* Adds the difference between from and to. */
static __always_inline __u32 csum_add_diff32(__u32 sum, __be32 from, __be32 to)
{
	return sum + (__u16)~from + (__u16) ~(from >> 16) + (__u16)to + (to >> 16);
}

/* Returns the difference between two addresses of IPv6. */
static __always_inline __u32 csum_diff_addr(const struct addr *from, const struct addr *to)
{
	const __u32 *a = (const __u32 *)from, *b = (const __u32 *)to;
	__u32 sum = 0;

	for (int i = 0; i < 4; i++)
		sum = csum_add_diff32(sum, a[i], b[i]);
	return sum;
}

static __always_inline __sum16 csum_fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~sum;
}
