/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From bytes to a struct packet. Reads only; nothing here depends on a map. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_endian.h>

#include "abi.h"

#define IPV4_FRAGMENT_MASK 0x3fff /* more fragments, or an offset (RFC 791) */

/* Echo messages (RFC 792, RFC 4443). The kernel's headers for them need a C library. */
#define ICMP4_ECHO_REPLY   0
#define ICMP4_ECHO_REQUEST 8
#define ICMP6_ECHO_REQUEST 128
#define ICMP6_ECHO_REPLY   129

struct echohdr {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__be16 id;
	__be16 sequence;
};

enum parsed {
	PARSED = 0,
	PARSED_NOT_IP,	  /* ARP and the like, or a frame not for this host: never ours */
	PARSED_TRUNCATED, /* nothing but the family is known */
	PARSED_FRAGMENT,  /* addresses are known, ports are not */
	PARSED_PROTOCOL,  /* likewise: neither TCP nor UDP nor ICMP echo, or extension headers */
};

/* The headers of one packet, in the terms of the maps. */
struct packet {
	struct addr src;
	struct addr dst;
	__u16 sport;
	__u16 dport;
	__u16 l4; /* offset of the TCP, UDP or ICMP header */
	__u8 protocol;
	bool ipv6;
	bool tcp_syn; /* SYN without ACK */
	bool tcp_end; /* FIN or RST */
	bool echo_reply;
};

/*
 * The len bytes at off if they are linear, else NULL. The empty asm keeps the
 * compiler from checking one sum and using another, which the verifier would
 * not know for the same.
 */
static __always_inline void *linear_at(struct __sk_buff *skb, __u32 off, __u32 len)
{
	void *at = (void *)(long)skb->data + off;

	asm volatile("" : "+r"(at));
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

/* In our maps that is IPv4; it has no business on a wire (RFC 4942, 2.2). */
static __always_inline bool addr_is_mapped(const struct addr *a)
{
	const __u32 *words = (const __u32 *)a;

	return !words[0] && !words[1] && words[2] == bpf_htonl(0xffff);
}

/* Loopback never crosses a wire (RFC 1122, 3.2.1.3; RFC 4291, 2.5.3). */
static __always_inline bool addr_is_loopback(const struct addr *a, bool ipv6)
{
	const __u32 *words = (const __u32 *)a;

	if (!ipv6)
		return a->bytes[12] == 127;
	return !words[0] && !words[1] && !words[2] && words[3] == bpf_htonl(1);
}

/* Of no use behind another source: link-local, multicast, broadcast. */
static __always_inline bool addr_is_link_scoped(const struct addr *a, bool ipv6)
{
	if (!ipv6)
		return a->bytes[12] >= 224 || (a->bytes[12] == 169 && a->bytes[13] == 254);
	return a->bytes[0] == 0xff || (a->bytes[0] == 0xfe && (a->bytes[1] & 0xc0) == 0x80);
}

/*
 * An echo message names its conversation by the identifier alone. It stands for
 * the port of the side that asked, so that one lookup serves all protocols.
 */
static __always_inline int parse_echo(struct packet *p, __u8 type, __be16 id)
{
	__u8 request = p->ipv6 ? ICMP6_ECHO_REQUEST : ICMP4_ECHO_REQUEST;
	__u8 reply = p->ipv6 ? ICMP6_ECHO_REPLY : ICMP4_ECHO_REPLY;

	if (type != request && type != reply)
		return PARSED_PROTOCOL;
	p->echo_reply = type == reply;
	p->sport = p->echo_reply ? 0 : bpf_ntohs(id);
	p->dport = p->echo_reply ? bpf_ntohs(id) : 0;
	return PARSED;
}

static __always_inline int parse_l4(struct __sk_buff *skb, struct packet *p)
{
	if (p->protocol == IPPROTO_TCP) {
		struct tcphdr *tcp = bytes_at(skb, p->l4, sizeof(*tcp));

		if (!tcp)
			return PARSED_TRUNCATED;
		p->sport = bpf_ntohs(tcp->source);
		p->dport = bpf_ntohs(tcp->dest);
		p->tcp_syn = tcp->syn && !tcp->ack;
		p->tcp_end = tcp->fin || tcp->rst;
		return PARSED;
	}
	if (p->protocol == IPPROTO_UDP) {
		struct udphdr *udp = bytes_at(skb, p->l4, sizeof(*udp));

		if (!udp)
			return PARSED_TRUNCATED;
		p->sport = bpf_ntohs(udp->source);
		p->dport = bpf_ntohs(udp->dest);
		return PARSED;
	}
	if (p->protocol == (p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP)) {
		struct echohdr *echo = bytes_at(skb, p->l4, sizeof(*echo));

		if (!echo)
			return PARSED_TRUNCATED;
		return parse_echo(p, echo->type, echo->id);
	}
	return PARSED_PROTOCOL;
}

static __always_inline int parse_ipv4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr *ip = bytes_at(skb, ETH_HLEN, sizeof(*ip));

	if (!ip || ip->ihl < 5)
		return PARSED_TRUNCATED;
	addr_from_ipv4(&p->src, ip->saddr);
	addr_from_ipv4(&p->dst, ip->daddr);
	p->protocol = ip->protocol;
	p->l4 = ETH_HLEN + ip->ihl * 4;
	if (ip->frag_off & bpf_htons(IPV4_FRAGMENT_MASK))
		return PARSED_FRAGMENT;
	return parse_l4(skb, p);
}

static __always_inline int parse_ipv6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr *ip = bytes_at(skb, ETH_HLEN, sizeof(*ip));

	if (!ip)
		return PARSED_TRUNCATED;
	__builtin_memcpy(&p->src, &ip->saddr, sizeof(p->src));
	__builtin_memcpy(&p->dst, &ip->daddr, sizeof(p->dst));
	p->protocol = ip->nexthdr;
	p->l4 = ETH_HLEN + sizeof(*ip);
	p->ipv6 = true;
	if (addr_is_mapped(&p->src) || addr_is_mapped(&p->dst))
		return PARSED_NOT_IP;
	if (p->protocol == IPPROTO_FRAGMENT)
		return PARSED_FRAGMENT;
	return parse_l4(skb, p);
}

/* Fills in p as far as the result says. A tagged frame is for the VLAN device above this one. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p)
{
	__builtin_memset(p, 0, sizeof(*p));
	if (skb->vlan_present)
		return PARSED_NOT_IP;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return parse_ipv4(skb, p);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return parse_ipv6(skb, p);
	return PARSED_NOT_IP;
}
