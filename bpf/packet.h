/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A packet in the terms of the maps. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_helpers.h>

#include "abi.h"

/*
 * The headers of one packet. Two kinds of packets carry no ports of their own,
 * and are given those of the connection that they belong to: a later fragment
 * has those of the first one, an ICMP error those of the packet that it carries,
 * addresses too, turned round since that went the other way.
 */
struct packet {
	/* The key of ways, as struct way_key has it. */
	struct addr src;
	struct addr dst;
	__u16 sport;
	__u16 dport;
	__u32 ifindex; /* of the device whose hook this is */
	__u8 protocol;
	bool ipv6;
	bool ported;	 /* TCP, UDP or ICMP echo; others are told apart by their addresses alone */
	bool echo_reply; /* the last of the key */

	__u16 l3;   /* offset of the IP header: 0 on devices without Ethernet */
	__u16 l4;   /* offset of what follows it */
	__u16 data; /* TCP and UDP: offset of what follows their header */
	__u8 ttl;
	bool plain; /* no fragment, no error, and nothing in its headers that a router looks at closer */
	__u32 length; /* of the IP packet */
	__u32 seq;    /* TCP */
	__u32 ack;
	bool tcp_syn;	 /* SYN without ACK: opens a connection */
	bool tcp_accept; /* SYN and ACK */
	bool tcp_fin;
	bool tcp_rst;
	bool tcp_refuse; /* RST without ACK: answers a segment of a connection that is not known */
	bool past_stack; /* to_uplink: comes from from_container, not from the stack */
	bool later;	 /* a fragment, not the first: there is no L4 header */
	bool release;	 /* the first fragment, for which later ones are held */
	bool error;	 /* an ICMP error; inner, inner_l4 and sender are for it alone */
	__u32 id;	 /* a fragment's, as in the packet */
	__u16 offset;	 /* a fragment's, in units of 8 bytes */
	__u16 payload;	 /* a fragment's, in bytes; a frame may be longer */
	__u16 inner;	 /* offset of the IP header that it carries */
	__u16 inner_l4;	 /* offset of what follows that */
	struct addr sender; /* who says so */
};

_Static_assert(offsetof(struct packet, echo_reply) == sizeof(struct way_key) - 1, "way_key");

/* How far a packet could be read. */
enum parsed {
	PARSED = 0,
	PARSED_NOT_IP,	  /* ARP and the like, or a frame for a VLAN device: never ours */
	PARSED_TRUNCATED, /* nothing but the family is known */
	PARSED_FRAGMENT, /* addresses are known; ports are not, since the first fragment was not seen */
	PARSED_PROTOCOL, /* likewise: ICMP for neighbours, extension headers */
};

static __always_inline bool packet_is_icmp(const struct packet *p)
{
	return p->protocol == (p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
}
