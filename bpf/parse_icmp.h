/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* ICMP and ICMPv6: echo, and errors with the packet that they quote. */
#pragma once

#include "addr.h"
#include "bytes.h"
#include "fragment.h"
#include "packet.h"

/* Echo messages (RFC 792, RFC 4443). The kernel's headers for them need a C library. */
#define ICMP4_ECHO_REPLY   0
#define ICMP4_ECHO_REQUEST 8
#define ICMP6_ECHO_REQUEST 128
#define ICMP6_ECHO_REPLY   129

/* Neighbor discovery (RFC 4861) and multicast listener discovery (RFC 3810). */
#define ICMP6_MLD_QUERY	       130
#define ICMP6_MLD_REPORT       131
#define ICMP6_MLD_DONE	       132
#define ICMP6_ROUTER_SOLICIT   133
#define ICMP6_ROUTER_ADVERT    134
#define ICMP6_NEIGHBOR_SOLICIT 135
#define ICMP6_NEIGHBOR_ADVERT  136
#define ICMP6_REDIRECT	       137
#define ICMP6_MLD2_REPORT      143

struct echohdr {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__be16 id;
	__be16 sequence;
};

/* ICMP errors: the messages that quote a packet (RFC 792, RFC 4443). */
#define ICMP4_UNREACHABLE   3
#define ICMP4_FRAG_NEEDED   4 /* code */
#define ICMP4_TIME_EXCEEDED 11
#define ICMP4_PARAMETER	    12
#define ICMP6_UNREACHABLE   1
#define ICMP6_TOO_BIG	    2
#define ICMP6_PARAMETER	    4

/*
 * The identifier is used as the port of the side that sent the request, so that one
 * lookup serves all protocols.
 */
static __always_inline int parse_echo(struct packet *p, __u8 type, __be16 id)
{
	__u8 request = p->ipv6 ? ICMP6_ECHO_REQUEST : ICMP4_ECHO_REQUEST;
	__u8 reply = p->ipv6 ? ICMP6_ECHO_REPLY : ICMP4_ECHO_REPLY;

	if (type != request && type != reply)
		return PARSED_PROTOCOL;
	p->has_ports = true;
	p->echo_reply = type == reply;
	p->sport = p->echo_reply ? 0 : bpf_ntohs(id);
	p->dport = p->echo_reply ? bpf_ntohs(id) : 0;
	return PARSED;
}

static __always_inline bool icmp_type_is_error(__u8 type, bool ipv6)
{
	if (ipv6)
		return type >= ICMP6_UNREACHABLE && type <= ICMP6_PARAMETER;
	return type == ICMP4_UNREACHABLE || type == ICMP4_TIME_EXCEEDED || type == ICMP4_PARAMETER;
}

/* Takes the ports of the quoted packet, swapped. At least eight bytes of it are quoted. */
static __always_inline int parse_icmp_inner(struct __sk_buff *skb, struct packet *p)
{
	struct echohdr *l4 = bytes_at(skb, p->inner_l4, sizeof(*l4));
	const __be16 *ports = (const __be16 *)l4;
	int parsed = PARSED;
	__u16 sport;

	if (!l4)
		return PARSED_TRUNCATED;
	if (is_tcp_or_udp(p->protocol) || p->protocol == IPPROTO_SCTP) {
		p->sport = bpf_ntohs(ports[0]);
		p->dport = bpf_ntohs(ports[1]);
		p->has_ports = p->protocol != IPPROTO_SCTP;
	} else if (packet_is_icmp(p)) {
		parsed = parse_echo(p, l4->type, l4->id);
	}
	sport = p->sport;
	p->sport = p->dport;
	p->dport = sport;
	return parsed;
}

/*
 * Takes the addresses of the quoted packet, swapped. Returns false unless the error
 * goes to that packet's sender: such an error cannot be translated.
 */
static __always_inline bool icmp_swap_tuple(struct packet *p, const struct addr *sender,
					    const struct addr *receiver)
{
	if (!addr_equal(sender, &p->dst) || (p->ipv6 && addr_is_mapped(receiver)))
		return false;
	p->src = *receiver;
	return true;
}

static __always_inline int parse_error_ipv4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr *ip = bytes_at(skb, p->inner_l3, sizeof(*ip));
	struct addr sender, receiver;

	if (!ip || ip->ihl < 5)
		return PARSED_TRUNCATED;
	addr_from_ipv4(&sender, ip->saddr);
	addr_from_ipv4(&receiver, ip->daddr);
	p->protocol = ip->protocol;
	p->inner_l4 = p->inner_l3 + ip->ihl * 4;
	if (!icmp_swap_tuple(p, &sender, &receiver) || ip->frag_off & bpf_htons(IPV4_OFFSET_MASK))
		return PARSED_PROTOCOL;
	return parse_icmp_inner(skb, p);
}

/* Skips a first fragment's header. A later fragment has no ports. */
static __always_inline int parse_error_ipv6_fragment(struct __sk_buff *skb, struct packet *p)
{
	struct fragment_header *header = bytes_at(skb, p->inner_l4, sizeof(*header));

	if (!header)
		return PARSED_TRUNCATED;
	p->protocol = header->next;
	p->inner_l4 += sizeof(*header);
	return bpf_ntohs(header->offset) >> 3 ? PARSED_PROTOCOL : PARSED;
}

static __always_inline int parse_error_ipv6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr *ip = bytes_at(skb, p->inner_l3, sizeof(*ip));
	struct addr sender, receiver;
	int parsed = PARSED;

	if (!ip)
		return PARSED_TRUNCATED;
	__builtin_memcpy(&sender, &ip->saddr, sizeof(sender));
	__builtin_memcpy(&receiver, &ip->daddr, sizeof(receiver));
	p->protocol = ip->nexthdr;
	p->inner_l4 = p->inner_l3 + sizeof(*ip);
	if (!icmp_swap_tuple(p, &sender, &receiver))
		return PARSED_PROTOCOL;
	if (p->protocol == IPPROTO_FRAGMENT)
		parsed = parse_error_ipv6_fragment(skb, p);
	return parsed == PARSED ? parse_icmp_inner(skb, p) : parsed;
}

static __noinline int parse_icmp(struct __sk_buff *skb, struct packet *p)
{
	struct echohdr *icmp = bytes_at(skb, p->l4, sizeof(*icmp));

	if (!icmp)
		return PARSED_TRUNCATED;
	if (!icmp_type_is_error(icmp->type, p->ipv6))
		return parse_echo(p, icmp->type, icmp->id);
	p->icmp_error = true;
	p->outer_src = p->src;
	p->icmp_too_big =
		p->ipv6 ? icmp->type == ICMP6_TOO_BIG
			: icmp->type == ICMP4_UNREACHABLE && icmp->code == ICMP4_FRAG_NEEDED;
	p->fast_eligible = false; /* although p has the connection's tuple */
	p->inner_l3 = p->l4 + sizeof(*icmp);
	return p->ipv6 ? parse_error_ipv6(skb, p) : parse_error_ipv4(skb, p);
}
