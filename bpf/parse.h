/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From bytes to a struct packet. Reads only, but for the ports of fragments. */
#pragma once

#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/tcp.h>
#include <linux/udp.h>

#include "addr.h"
#include "bytes.h"
#include "fragment.h"
#include "packet.h"
#include "parse_icmp.h"

#define VLAN_ID 0xfff /* of a tag; the rest is priority */

static __always_inline int parse_tcp(struct __sk_buff *skb, struct packet *p)
{
	struct tcphdr *tcp = bytes_at(skb, p->l4, sizeof(*tcp));

	if (!tcp)
		return PARSED_TRUNCATED;
	p->sport = bpf_ntohs(tcp->source);
	p->dport = bpf_ntohs(tcp->dest);
	p->l4_payload = p->l4 + tcp->doff * 4;
	p->seq = bpf_ntohl(tcp->seq);
	p->ack = bpf_ntohl(tcp->ack_seq);
	p->tcp_syn = tcp->syn && !tcp->ack;
	p->tcp_synack = tcp->syn && tcp->ack;
	p->tcp_fin = tcp->fin;
	p->tcp_rst = tcp->rst;
	p->tcp_rst_noack = tcp->rst && !tcp->ack;
	p->has_ports = true;
	return PARSED;
}

static __always_inline int parse_udp(struct __sk_buff *skb, struct packet *p)
{
	struct udphdr *udp = bytes_at(skb, p->l4, sizeof(*udp));

	if (!udp)
		return PARSED_TRUNCATED;
	p->sport = bpf_ntohs(udp->source);
	p->dport = bpf_ntohs(udp->dest);
	p->l4_payload = p->l4 + sizeof(*udp);
	p->has_ports = true;
	return PARSED;
}

static __always_inline int parse_l4(struct __sk_buff *skb, struct packet *p)
{
	switch (p->protocol) {
	case IPPROTO_TCP:
		return parse_tcp(skb, p);
	case IPPROTO_UDP:
		return parse_udp(skb, p);
	case IPPROTO_ICMP:
		return p->ipv6 ? PARSED : parse_icmp(skb, p);
	case IPPROTO_ICMPV6:
		return p->ipv6 ? parse_icmp(skb, p) : PARSED;
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_DSTOPTS:
	case IPPROTO_MH:
		return p->ipv6 ? PARSED_PROTOCOL : PARSED;
	default:
		return PARSED;
	}
}

/* The first fragment leaves its ports for the later ones. */
static __always_inline int parse_fragment(struct __sk_buff *skb, struct packet *p, __u32 id,
					  __u16 offset)
{
	int parsed;

	p->frag_id = id;
	p->frag_offset = offset;
	if (offset)
		return fragment_lookup(p);
	parsed = parse_l4(skb, p);
	if (p->icmp_error) /* none of the usual ones is too long for one packet; p is not of its tuple */
		return PARSED_PROTOCOL;
	fragment_track(p, parsed != PARSED);
	return parsed;
}

/* What the header says, which is 0 of a packet that is too long for it (BIG TCP). */
static __always_inline __u32 length_of(struct __sk_buff *skb, const struct packet *p, __u16 says,
				       __u32 header)
{
	return says ? says + header : skb->len - p->l3;
}

static __always_inline int parse_ipv4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr *ip = bytes_at(skb, p->l3, sizeof(*ip));

	if (!ip || ip->ihl < 5)
		return PARSED_TRUNCATED;
	addr_from_ipv4(&p->src, ip->saddr);
	addr_from_ipv4(&p->dst, ip->daddr);
	p->protocol = ip->protocol;
	p->l4 = p->l3 + ip->ihl * 4;
	p->frag_len = bpf_ntohs(ip->tot_len) - ip->ihl * 4;
	p->len = length_of(skb, p, bpf_ntohs(ip->tot_len), 0);
	p->ttl = ip->ttl;
	if (ip->frag_off & bpf_htons(IPV4_FRAGMENT_MASK))
		return parse_fragment(skb, p, ip->id, bpf_ntohs(ip->frag_off) & IPV4_OFFSET_MASK);
	p->fast_eligible = ip->ihl == 5 && !skb->vlan_present;
	return parse_l4(skb, p);
}

static __always_inline int parse_ipv6_fragment(struct __sk_buff *skb, struct packet *p)
{
	struct fragment_header *header = bytes_at(skb, p->l4, sizeof(*header));

	if (!header)
		return PARSED_TRUNCATED;
	p->protocol = header->next;
	p->l4 += sizeof(*header);
	p->frag_len -= sizeof(*header);
	return parse_fragment(skb, p, header->id, bpf_ntohs(header->offset) >> 3);
}

#define OPTIONS_HEADERS 2 /* hop-by-hop, and the destination's (RFC 8200, 4.1) */
#define OPTIONS_LENGTH                                                                             \
	48 /* of each, in bytes: what comes after two is still within what bytes_at can reach */

/*
 * Goes past options, which a translation does not touch. Routing headers are not
 * gone past: they say that the destination is another than the packet has.
 */
static __always_inline bool skip_options(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6_opt_hdr *options;
	__u32 length;

	for (int i = 0; i < OPTIONS_HEADERS; i++) {
		if (p->protocol != IPPROTO_HOPOPTS && p->protocol != IPPROTO_DSTOPTS)
			return true;
		options = bytes_at(skb, p->l4, sizeof(*options));
		if (!options)
			return false;
		length = (options->hdrlen + 1) * 8;
		if (length > OPTIONS_LENGTH)
			return false;
		p->protocol = options->nexthdr;
		p->l4 += length;
		p->frag_len -= length;
	}
	return true;
}

static __always_inline int parse_ipv6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr *ip = bytes_at(skb, p->l3, sizeof(*ip));
	bool jumbo;

	if (!ip)
		return PARSED_TRUNCATED;
	__builtin_memcpy(&p->src, &ip->saddr, sizeof(p->src));
	__builtin_memcpy(&p->dst, &ip->daddr, sizeof(p->dst));
	p->protocol = ip->nexthdr;
	p->frag_len = bpf_ntohs(ip->payload_len);
	p->len = length_of(skb, p, bpf_ntohs(ip->payload_len), sizeof(*ip));
	jumbo = !ip->payload_len && skb->gso_size;
	p->ttl = ip->hop_limit;
	p->l4 = p->l3 + sizeof(*ip);
	p->ipv6 = true;
	if (addr_is_mapped(&p->src))
		return PARSED_NOT_IP;
	if (addr_is_mapped(&p->dst)) /* which the maps would take for IPv4; the stack forwards it */
		return PARSED_PROTOCOL;
	if (!skip_options(skb, p))
		return PARSED_PROTOCOL;
	if (p->protocol == IPPROTO_FRAGMENT)
		return parse_ipv6_fragment(skb, p);
	/* BIG TCP has a jumbo option instead of a length (RFC 2675). */
	p->fast_eligible = (p->l4 == p->l3 + sizeof(*ip) || jumbo) && !skb->vlan_present;
	return parse_l4(skb, p);
}

/* The frame is for the VLAN device above this one. A tag of priority alone changes nothing (802.1Q, 6.9). */
static __always_inline bool has_vlan(struct __sk_buff *skb)
{
	return skb->vlan_present && skb->vlan_tci & VLAN_ID;
}

/* Fills in p as far as the result says. The IP header is at l3. */
static __noinline int parse(struct __sk_buff *skb, struct packet *p, __u32 l3)
{
	__builtin_memset(p, 0, sizeof(*p));
	p->l3 = l3;
	p->ifindex = skb->ifindex;
	if (has_vlan(skb))
		return PARSED_NOT_IP;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return parse_ipv4(skb, p);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return parse_ipv6(skb, p);
	return PARSED_NOT_IP;
}

/*
 * One place per CPU: programs do not run inside of each other. But to_uplink does where it sends
 * held fragments by its own device, after which it looks at no packet any more.
 */
static __always_inline struct packet *pkt_scratch_get(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&pkt_scratch, &zero);
}
