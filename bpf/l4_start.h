/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The start of a TCP or UDP header, which translation changes: the ports and, if the kernel or the device still has
 * to compute it (CHECKSUM_PARTIAL), the checksum, which has the sum of the pseudo header until then. So both, and what
 * the caller has in front of them, take one store and no helper for checksums. Linux 6.6 and later show the programs
 * the state of the checksum.
 */
#pragma once

#include <linux/errno.h>
#include <bpf/bpf_core_read.h>

#include "bytes.h"
#include "checksum.h"
#include "kernel.h"
#include "packet.h"

#define CHECKSUM_PARTIAL   3
#define CHECKSUM_MANGLED_0 0xffff /* UDP: 0 means none (RFC 768) */
#define L4_START_LEN	   4	  /* the ports */
#define L4_START_LEN_UDP   8	  /* up to the checksum */
#define L4_START_LEN_TCP   18

struct l4_start {
	union {
		struct {
			__be16 sport;
			__be16 dport;
		};
		__be32 ports;
	};
	union {
		struct {
			__be16 len;
			__sum16 check;
		} udp;
		struct {
			__be32 numbers[3];
			__sum16 check;
		} tcp;
	};
};

/* Reports whether the checksum is still to be computed. */
static __always_inline bool checksum_is_partial(struct __sk_buff *skb)
{
	const struct sk_buff *packet;

	if (!config.sees_hooks)
		return false;
	packet = bpf_cast_to_kern_ctx(skb);
	return bpf_core_field_exists(packet->ip_summed) &&
	       BPF_CORE_READ_BITFIELD(packet, ip_summed) == CHECKSUM_PARTIAL;
}

/* Returns how much of p's header it has read into l4, in bytes: L4_START_LEN and so on; 0: it is not linear. */
static __always_inline __u32 l4_start_read(struct __sk_buff *skb, const struct packet *p,
					   struct l4_start *l4)
{
	bool partial = checksum_is_partial(skb);
	struct l4_start *from = linear_at(skb, p->l4, L4_START_LEN_UDP);

	if (!from)
		return 0;
	l4->ports = from->ports;
	if (!partial)
		return L4_START_LEN;
	l4->udp = from->udp;
	if (p->protocol == IPPROTO_UDP)
		return L4_START_LEN_UDP;
	from = linear_at(skb, p->l4, L4_START_LEN_TCP);
	if (!from)
		return 0;
	for (int i = 0; i < 3; i++)
		l4->tcp.numbers[i] = from->tcp.numbers[i];
	l4->tcp.check = from->tcp.check;
	return L4_START_LEN_TCP;
}

/* Adds the difference of an address to the sum of the pseudo header. */
static __always_inline __sum16 checksum_add_pseudo(__sum16 check, __u32 diff)
{
	return ~csum_fold(check + (diff & 0xffff) + (diff >> 16));
}

/*
 * Sets the port of a side in l4, of which len bytes have been read, and updates the checksum, in l4 or in skb at its place, by
 * the port and the difference of the address. The caller writes l4.
 */
static __always_inline long l4_start_translate(struct __sk_buff *skb, const struct packet *p,
					       struct l4_start *l4, __u32 len, enum side side,
					       __u32 diff, __be16 port)
{
	__be16 former = side == SIDE_SRC ? l4->sport : l4->dport;
	__u64 flags = p->protocol == IPPROTO_UDP ? BPF_F_MARK_MANGLED_0 : 0;
	__u32 place = p->l4 + (flags ? L4_START_LEN_UDP : L4_START_LEN_TCP) - sizeof(__sum16);
	long err;

	if (side == SIDE_SRC)
		l4->sport = port;
	else
		l4->dport = port;
	if (len == L4_START_LEN_TCP) {
		l4->tcp.check = checksum_add_pseudo(l4->tcp.check, diff);
		return 0;
	}
	if (len == L4_START_LEN_UDP) {
		if (l4->udp.check)
			l4->udp.check =
				checksum_add_pseudo(l4->udp.check, diff) ?: CHECKSUM_MANGLED_0;
		return 0;
	}
	err = p->ipv6 ? csum_replace_pseudo_ipv6(skb, place, diff, flags)
		      : bpf_l4_csum_replace(skb, place, 0, diff, flags | BPF_F_PSEUDO_HDR);
	if (err || former == port)
		return err;
	return bpf_l4_csum_replace(skb, place, former, port, flags | sizeof(port));
}
