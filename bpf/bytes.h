/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Access to the bytes of a packet. */
#pragma once

#include <stddef.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

/*
 * The len bytes at off if they are linear, else NULL. The empty asm keeps the
 * compiler from checking one sum and using another, which the verifier would
 * not know for the same. It also wants a bound for off, which is never as large:
 * two IPv4 headers with options, and what is around them, are 142 bytes.
 */
static __always_inline void *linear_at(struct __sk_buff *skb, __u32 off, __u32 len)
{
	void *at = (void *)(long)skb->data;

	asm volatile("%[off] &= 0xff\n"
		     "%[at] += %[off]"
		     : [at] "+r"(at), [off] "+r"(off));
	return at + len > (void *)(long)skb->data_end ? NULL : at;
}

/*
 * Returns the len bytes at off, made linear where they were not, or NULL where
 * the packet is shorter. Pointers got before are invalid afterwards.
 */
static __always_inline void *bytes_at(struct __sk_buff *skb, __u32 off, __u32 len)
{
	void *at = linear_at(skb, off, len);

	if (!at && !bpf_skb_pull_data(skb, off + len))
		at = linear_at(skb, off, len);
	return at;
}
