/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Checksums, and the two sides that a packet has. */
#pragma once

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

enum side {
	SIDE_SRC,
	SIDE_DST,
};

#ifndef EINVAL
#define EINVAL 22
#endif

/*
 * A full IPv6 checksum from the NIC (CHECKSUM_COMPLETE) stays right when an
 * address and the L4 checksum change together, but kernels change it unless
 * told not to. The flag came with 6.16 and went to the stable series; a kernel
 * without it answers EINVAL before it has changed anything.
 */
#define F_IPV6 (1ULL << 7) /* BPF_F_IPV6 */

static __always_inline long replace_pseudo_ipv6(struct __sk_buff *skb, __u32 checksum, __s64 diff,
						__u64 flags)
{
	long err;

	flags |= BPF_F_PSEUDO_HDR;
	err = bpf_l4_csum_replace(skb, checksum, 0, diff, flags | F_IPV6);
	if (err == -EINVAL)
		err = bpf_l4_csum_replace(skb, checksum, 0, diff, flags);
	return err;
}
