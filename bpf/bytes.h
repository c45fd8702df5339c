/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Access to the bytes of a packet, and the headers in them. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>

/*
 * Returns the len bytes at offset, or NULL if they are not linear. The asm keeps
 * the compiler from checking one sum and using another, which the verifier could
 * not match. The mask is the bound that the verifier requires for offset; all
 * headers that are read end well below it.
 */
static __always_inline void *linear_at(struct __sk_buff *skb, __u32 offset, __u32 len)
{
	void *bytes = (void *)(long)skb->data;

	asm volatile("%[offset] &= 0xff\n"
		     "%[bytes] += %[offset]"
		     : [bytes] "+r"(bytes), [offset] "+r"(offset));
	return bytes + len > (void *)(long)skb->data_end ? NULL : bytes;
}

/*
 * Returns the len bytes at offset and makes them linear if necessary, or NULL if
 * the packet is shorter. Invalidates pointers returned before.
 */
static __always_inline void *bytes_at(struct __sk_buff *skb, __u32 offset, __u32 len)
{
	void *bytes = linear_at(skb, offset, len);

	if (!bytes && !bpf_skb_pull_data(skb, offset + len))
		bytes = linear_at(skb, offset, len);
	return bytes;
}

#define VLAN_ID 0xfff /* the rest of a tag is priority */

/*
 * Reports whether the frame is for a VLAN device above this one. VLAN 0 is only a priority
 * (802.1Q, 6.9).
 */
static __always_inline bool has_vlan(struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_ID;
}
