/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* From bytes to a struct packet. Only parse_fragment writes a map: the ports of fragments. */
#pragma once

#include "addr.h"
#include "bytes.h"
#include "fragment.h"
#include "packet.h"
#include "parse_icmp.h"
#include "tag.h"

#define IPV6_HOP_LIMIT_MASK (bpf_be64_to_cpu(0xff))

struct sctphdr {
	__be16 source;
	__be16 dest;
	__be32 tag;
	__le32 checksum;
	__u8 chunk; /* type of the first one */
};

#define SCTP_ABORT 6

/* Returns the flags and the header's length: the 16 bits before the window. */
static __always_inline __be16 tcp_flags_of(const struct tcphdr *tcp)
{
	return *((const __be16 *)&tcp->window - 1);
}

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
	p->tcp_ack = tcp->ack;
	p->tcp_flags = tcp_flags_of(tcp);
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

/* SCTP's ports are never translated: its checksum (CRC32c) cannot be updated by difference. */
static __always_inline int parse_sctp(struct __sk_buff *skb, struct packet *p)
{
	struct sctphdr *sctp = bytes_at(skb, p->l4, sizeof(*sctp));

	if (!sctp)
		return PARSED_TRUNCATED;
	p->sport = bpf_ntohs(sctp->source);
	p->dport = bpf_ntohs(sctp->dest);
	p->sctp_init = !sctp->tag; /* RFC 9260, 8.5.1 */
	p->sctp_abort = sctp->chunk == SCTP_ABORT;
	return PARSED;
}

static __noinline int parse_l4(struct __sk_buff *skb, struct packet *p)
{
	switch (p->protocol) {
	case IPPROTO_TCP:
		return parse_tcp(skb, p);
	case IPPROTO_UDP:
		return parse_udp(skb, p);
	case IPPROTO_SCTP:
		return parse_sctp(skb, p);
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_FRAGMENT: /* behind another one */
	case IPPROTO_DSTOPTS:
	case IPPROTO_MH:
		return p->ipv6 ? PARSED_PROTOCOL : PARSED;
	default:
		return packet_is_icmp(p) ? parse_icmp(skb, p) : PARSED;
	}
}

/* The IP packet's length. Its field is 0 if it is too long for that (BIG TCP). */
static __always_inline __u32 parse_len(struct __sk_buff *skb, const struct packet *p, __u16 field,
				       __u32 header)
{
	return field ? field + header : skb->len - p->l3;
}

static __always_inline int parse_ipv4(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr *ip = bytes_at(skb, p->l3, sizeof(*ip));

	if (!ip || ip->version != 4 || ip->ihl < 5)
		return PARSED_TRUNCATED;
	p->ip_start = *(__u64 *)ip;
	addr_from_ipv4(&p->src, ip->saddr);
	addr_from_ipv4(&p->dst, ip->daddr);
	p->protocol = ip->protocol;
	p->l4 = p->l3 + ip->ihl * 4;
	p->len = parse_len(skb, p, bpf_ntohs(ip->tot_len), 0);
	p->ttl = ip->ttl;
	if (ip->frag_off & bpf_htons(IPV4_FRAGMENT_MASK)) {
		p->frag_id = ip->id;
		p->frag_offset = bpf_ntohs(ip->frag_off) & IPV4_OFFSET_MASK;
		return PARSED_FRAGMENT;
	}
	p->fast_eligible = ip->ihl == 5 && !skb->vlan_present;
	return PARSED;
}

static __always_inline int parse_ipv6_fragment(struct __sk_buff *skb, struct packet *p)
{
	struct fragment_header *header = bytes_at(skb, p->l4, sizeof(*header));

	if (!header)
		return PARSED_TRUNCATED;
	p->protocol = header->next;
	p->l4 += sizeof(*header);
	p->frag_id = header->id;
	p->frag_offset = bpf_ntohs(header->offset) >> 3;
	return PARSED_FRAGMENT;
}

#define OPTIONS_HEADERS 2  /* hop-by-hop, and destination options (RFC 8200, 4.1) */
#define OPTIONS_MAX_LEN 48 /* bytes of each: bytes_at must reach what follows two of them */

/*
 * Skips options, which translation leaves alone. Not routing headers: with them
 * the packet's destination is not the final one.
 */
static __always_inline bool parse_skip_options(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6_opt_hdr *options;
	__u32 len;

	for (int i = 0; i < OPTIONS_HEADERS; i++) {
		if (p->protocol != IPPROTO_HOPOPTS && p->protocol != IPPROTO_DSTOPTS)
			return true;
		options = bytes_at(skb, p->l4, sizeof(*options));
		if (!options)
			return false;
		len = (options->hdrlen + 1) * 8;
		if (len > OPTIONS_MAX_LEN)
			return false;
		p->protocol = options->nexthdr;
		p->l4 += len;
	}
	return true;
}

static __always_inline int parse_ipv6(struct __sk_buff *skb, struct packet *p)
{
	struct ipv6hdr *ip = bytes_at(skb, p->l3, sizeof(*ip));
	bool jumbo;

	if (!ip || ip->version != 6)
		return PARSED_TRUNCATED;
	p->ip_start = *(__u64 *)ip;
	__builtin_memcpy(&p->src, &ip->saddr, sizeof(p->src));
	__builtin_memcpy(&p->dst, &ip->daddr, sizeof(p->dst));
	p->protocol = ip->nexthdr;
	p->len = parse_len(skb, p, bpf_ntohs(ip->payload_len), sizeof(*ip));
	jumbo = !ip->payload_len && skb->gso_size;
	p->ttl = ip->hop_limit;
	p->l4 = p->l3 + sizeof(*ip);
	p->ipv6 = true;
	if (addr_is_mapped(&p->src))
		return PARSED_NOT_IP;
	/* A mapped address means IPv4 in our maps, but the stack would forward it as IPv6. */
	if (addr_is_mapped(&p->dst) || !parse_skip_options(skb, p))
		return PARSED_PROTOCOL;
	if (p->protocol == IPPROTO_FRAGMENT)
		return parse_ipv6_fragment(skb, p);
	/* BIG TCP has a jumbo option instead of a length (RFC 2675). */
	p->fast_eligible = (p->l4 == p->l3 + sizeof(*ip) || jumbo) && !skb->vlan_present;
	return PARSED;
}

/*
 * Fills in pkt_scratch from the IP header at l3, as far as the returned enum parsed
 * says. Each fragment, including the first, is PARSED_FRAGMENT until parse_fragment.
 */
__noinline int parse_headers(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = pkt_scratch_get();
	int parsed = PARSED_NOT_IP;

	if (!p)
		return PARSED_NOT_IP;
	__builtin_memset(p, 0, sizeof(*p));
	p->l3 = l3;
	p->ifindex = skb->ifindex;
	p->skb_len = skb->len;
	if (has_vlan(skb))
		return PARSED_NOT_IP;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		parsed = parse_ipv4(skb, p);
	else if (skb->protocol == bpf_htons(ETH_P_IPV6))
		parsed = parse_ipv6(skb, p);
	if (parsed == PARSED)
		parsed = parse_l4(skb, p);
	packet_set_id(p);
	return parsed;
}

/* Records the ports of a first fragment; fills in those of a later one. */
static __noinline int parse_fragment(struct __sk_buff *skb, struct packet *p)
{
	struct fragment_key key;
	int parsed;

	if (p->frag_offset) {
		parsed = fragment_fill_ports(p);
		packet_set_id(p);
		return parsed;
	}
	fragment_key(&key, p);
	parsed = parse_l4(skb, p);
	if (p->icmp_error) { /* those that need translation are short enough for one packet */
		p->icmp_error = false;
		p->src = key.src; /* not that of the quoted packet */
		p->protocol = key.protocol;
		parsed = PARSED_PROTOCOL;
	}
	packet_set_id(p);
	fragment_track(&key, p, parsed != PARSED);
	return parsed;
}

/* Reports whether p's IP header is at its place in skb, but for the TTL and the checksum. */
static __always_inline bool parse_has_ip(struct __sk_buff *skb, struct packet *p)
{
	struct iphdr *ip = linear_at(skb, p->l3, sizeof(*ip));
	struct ipv6hdr *ip6;

	if (!p->ipv6) {
		if (!ip || *(__u64 *)ip != p->ip_start || ip->protocol != p->protocol ||
		    ip->saddr != addr_ipv4(&p->src) || ip->daddr != addr_ipv4(&p->dst))
			return false;
		p->ttl = ip->ttl;
		return true;
	}
	ip6 = linear_at(skb, p->l3, sizeof(*ip6));
	if (!ip6 || (*(__u64 *)ip6 ^ p->ip_start) & ~IPV6_HOP_LIMIT_MASK ||
	    !addr_equal((struct addr *)&ip6->saddr, &p->src) ||
	    !addr_equal((struct addr *)&ip6->daddr, &p->dst))
		return false;
	p->ttl = ip6->hop_limit;
	return true;
}

/* The same for the TCP or UDP header, but for the checksum. */
static __always_inline bool parse_has_l4(struct __sk_buff *skb, const struct packet *p)
{
	struct tcphdr *tcp = linear_at(skb, p->l4, sizeof(struct udphdr));

	if (!tcp || tcp->source != bpf_htons(p->sport) || tcp->dest != bpf_htons(p->dport))
		return false;
	if (p->protocol == IPPROTO_UDP)
		return true;
	tcp = linear_at(skb, p->l4, sizeof(*tcp));
	return tcp && tcp->seq == bpf_htonl(p->seq) && tcp->ack_seq == bpf_htonl(p->ack) &&
	       tcp_flags_of(tcp) == p->tcp_flags;
}

/*
 * Reports whether pkt_scratch still has the packet, which an ingress hook has left to the stack on this
 * CPU, as it is now: then comparing costs less than parsing. Updates what may differ.
 */
__noinline int parse_again(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = pkt_scratch_get();

	if (!p || !p->in_stack || p->l3 != l3 || p->skb_len != skb->len || skb->vlan_present ||
	    skb->protocol != (p->ipv6 ? bpf_htons(ETH_P_IPV6) : bpf_htons(ETH_P_IP)) ||
	    !parse_has_ip(skb, p) || !parse_has_l4(skb, p))
		return false;
	p->ifindex = skb->ifindex;
	p->in_stack = false;
	p->now = 0;
	__builtin_memset(&p->decided, 0, sizeof(p->decided));
	return true;
}

/* Fills in p, at a hook that sends what the stack has forwarded. Fragments get their ports. */
static __always_inline int parse(struct __sk_buff *skb, struct packet *p, __u32 l3)
{
	int parsed;

	if (parse_again(skb, l3))
		return PARSED;
	parsed = parse_headers(skb, l3);

	return parsed == PARSED_FRAGMENT ? parse_fragment(skb, p) : parsed;
}
