/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * antiSpoof: a container sends from its own MAC and addresses only, and speaks
 * for no other. It is asked before parse.h, which remembers fragments by their
 * addresses. Ordinary packets are compared with one entry; all others are read to the end of
 * their headers, and dropped where that cannot be done (RFC 7113, 2.1).
 */
#pragma once

#include "fib.h"
#include "parse.h"
#include "verdict.h"

#define SPOOF_NONE -1 /* else an enum reason */

#define DHCP4_SERVER 67
#define DHCP4_CLIENT 68
#define DHCP6_CLIENT 546

static __always_inline bool mac_equal(const __u8 *a, const __u8 *b)
{
	const __u16 *x = (const __u16 *)a, *y = (const __u16 *)b;

	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2];
}

/*
 * TCP or UDP whose headers are where they most often are, so that the source is
 * all that has to be judged.
 */
static __always_inline bool spoof_is_plain(struct __sk_buff *skb, struct addr *source)
{
	__u32 l4 = ETH_HLEN;
	__u16 dhcp_client;
	struct ipv6hdr *ip6;
	struct udphdr *udp;
	struct iphdr *ip4;
	__u8 protocol;

	if (skb->vlan_present)
		return false;
	if (skb->protocol == bpf_htons(ETH_P_IP)) {
		ip4 = linear_at(skb, ETH_HLEN, sizeof(*ip4));
		if (!ip4 || ip4->version != 4 || ip4->ihl != 5 ||
		    ip4->frag_off & bpf_htons(IPV4_OFFSET_MASK))
			return false;
		addr_from_ipv4(source, ip4->saddr);
		protocol = ip4->protocol;
		dhcp_client = DHCP4_CLIENT;
		l4 += sizeof(*ip4);
	} else if (skb->protocol == bpf_htons(ETH_P_IPV6)) {
		ip6 = linear_at(skb, ETH_HLEN, sizeof(*ip6));
		if (!ip6 || ip6->version != 6 || ip6->saddr.in6_u.u6_addr8[0] < 0x20)
			return false; /* the last is for mapped addresses */
		__builtin_memcpy(source, &ip6->saddr, sizeof(*source));
		protocol = ip6->nexthdr;
		dhcp_client = DHCP6_CLIENT;
		l4 += sizeof(*ip6);
	} else {
		return false;
	}
	if (protocol != IPPROTO_UDP)
		return protocol == IPPROTO_TCP;
	udp = linear_at(skb, l4, sizeof(*udp));
	return udp && udp->dest != bpf_htons(dhcp_client);
}

/* Ordinary packets in its name and from its MAC: nothing else has to be looked at. */
static __always_inline bool spoof_passes(struct __sk_buff *skb, const struct device *device)
{
	struct addr source;
	struct ethhdr *eth;

	if (!spoof_is_plain(skb, &source))
		return false;
	if (!addr_equal(&source, &device->addr4) && !addr_equal(&source, &device->addr6))
		return false;
	eth = linear_at(skb, 0, sizeof(*eth));
	return eth && mac_equal(eth->h_source, device->mac);
}

/* The host has the address: that of a bridge, which is a gateway, among them. */
static __always_inline bool spoof_is_hosts(struct __sk_buff *skb, const struct addr *addr,
					   bool ipv6)
{
	struct packet *p = pkt_scratch_get();

	if (!p)
		return true;
	__builtin_memset(p, 0, sizeof(*p));
	p->dst = *addr;
	p->ipv6 = ipv6;
	return addr_is_loopback(addr, ipv6) || fib_is_local(skb);
}

/*
 * An address that the container was given, on whichever of its interfaces since
 * its routes choose by which to answer; or, where it was given none, that nobody has.
 */
static __always_inline bool spoof_owns(struct __sk_buff *skb, const struct device *device,
				       const struct addr *addr, bool ipv6)
{
	struct endpoint *endpoint = bpf_map_lookup_elem(&endpoints, addr);

	if (endpoint)
		return endpoint->container == device->container;
	return device->flags & DEVICE_ANY_ADDRESS && !spoof_is_hosts(skb, addr, ipv6);
}

/* fe80::1, which the host has on every veth. */
static __always_inline bool addr_is_host_link_local(const struct addr *addr)
{
	const __u32 *words = (const __u32 *)addr;

	return words[0] == bpf_htonl(0xfe800000) && !words[1] && !words[2] &&
	       words[3] == bpf_htonl(1);
}

static __always_inline bool spoof_is_gateway(const struct device *device, const struct addr *addr)
{
	return addr_equal(addr, &device->gateway4) || addr_equal(addr, &device->gateway6) ||
	       addr_is_host_link_local(addr);
}

/* The address that the kernel makes of a MAC (RFC 4291, appendix A). */
static __always_inline bool addr_is_of_mac(const struct addr *addr, const __u8 *mac)
{
	const __u8 *id = addr->bytes + 8;

	return !((const __u32 *)addr)[1] && id[0] == (mac[0] ^ 2) && id[1] == mac[1] &&
	       id[2] == mac[2] && id[3] == 0xff && id[4] == 0xfe && id[5] == mac[3] &&
	       id[6] == mac[4] && id[7] == mac[5];
}

/*
 * A container makes its link-local addresses itself, and the host does not
 * forward them: on a link that it has alone, it may use any but the host's.
 */
static __always_inline bool spoof_owns_link_local(const struct device *device,
						  const struct addr *addr)
{
	if (addr->bytes[0] != 0xfe || (addr->bytes[1] & 0xc0) != 0x80)
		return false;
	return !(device->flags & DEVICE_BRIDGED) || addr_is_of_mac(addr, device->mac);
}

/* The judgement of an address that the container uses as its own. */
static __noinline int spoof_address(struct __sk_buff *skb, const struct device *device,
				    const struct addr *addr, bool ipv6)
{
	if (spoof_is_gateway(device, addr))
		return REASON_GATEWAY;
	if (addr_is_any(addr, ipv6) || (ipv6 && addr_is_mapped(addr)))
		return REASON_ADDRESS;
	if (spoof_owns(skb, device, addr, ipv6) || (ipv6 && spoof_owns_link_local(device, addr)))
		return SPOOF_NONE;
	return REASON_ADDRESS;
}

#define ARP_ETHERNET 1

struct arp_ipv4 {
	__be16 hardware;
	__be16 protocol;
	__u8 hardware_length;
	__u8 protocol_length;
	__be16 operation;
	__u8 sender_mac[ETH_ALEN];
	__be32 sender;
	__u8 target_mac[ETH_ALEN];
	__be32 target;
} __attribute__((packed));

/* An announcement for the sender's address; without one (RFC 5227), for the one that is asked for. */
static __noinline int spoof_arp(struct __sk_buff *skb, const struct device *device, __u32 at)
{
	struct arp_ipv4 *arp = bytes_at(skb, at, sizeof(*arp));
	struct addr addr;

	if (!arp)
		return REASON_TRUNCATED;
	if (arp->hardware != bpf_htons(ARP_ETHERNET) || arp->protocol != bpf_htons(ETH_P_IP) ||
	    arp->hardware_length != ETH_ALEN || arp->protocol_length != sizeof(arp->sender) ||
	    !mac_equal(arp->sender_mac, device->mac))
		return REASON_ARP;
	addr_from_ipv4(&addr, arp->sender ?: arp->target);
	return spoof_address(skb, device, &addr, false) == SPOOF_NONE ? SPOOF_NONE : REASON_ARP;
}

#define ICMP4_REDIRECT	    5
#define ICMP4_ROUTER_ADVERT 9

static __noinline int spoof_ipv4(struct __sk_buff *skb, const struct device *device, __u32 at)
{
	struct iphdr *ip = bytes_at(skb, at, sizeof(*ip));
	struct udphdr *udp;
	struct addr source;
	__u8 protocol, *icmp;
	bool later;
	int checked;

	if (!ip || ip->version != 4 || ip->ihl < 5)
		return REASON_TRUNCATED;
	addr_from_ipv4(&source, ip->saddr);
	protocol = ip->protocol;
	later = ip->frag_off & bpf_htons(IPV4_OFFSET_MASK);
	at += ip->ihl * 4;
	checked = spoof_address(skb, device, &source, false);
	if (later)
		return checked;
	if (protocol == IPPROTO_ICMP && checked == SPOOF_NONE) {
		icmp = bytes_at(skb, at, sizeof(*icmp));
		if (!icmp)
			return REASON_TRUNCATED;
		if (*icmp == ICMP4_ROUTER_ADVERT || *icmp == ICMP4_REDIRECT)
			return REASON_ROUTER;
	}
	if (protocol != IPPROTO_UDP)
		return checked;
	udp = bytes_at(skb, at, sizeof(*udp));
	if (!udp)
		return REASON_TRUNCATED;
	if (checked == SPOOF_NONE && udp->dest == bpf_htons(DHCP4_CLIENT))
		return REASON_DHCP_SERVER;
	if (!addr_ipv4(&source) && udp->source == bpf_htons(DHCP4_CLIENT) &&
	    udp->dest == bpf_htons(DHCP4_SERVER)) /* a client without an address asks for one */
		return SPOOF_NONE;
	return checked;
}

#define ICMP6_LISTENER_REPORT	 131
#define ICMP6_LISTENER_DONE	 132
#define ICMP6_ROUTER_SOLICIT	 133
#define ICMP6_ROUTER_ADVERT	 134
#define ICMP6_REDIRECT		 137
#define ICMP6_LISTENER_REPORT_V2 143

struct neighbor {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__be32 flags;
	struct addr target;
};

/*
 * ICMPv6 with judged as the judgement of its source. From no address at all
 * one may only ask for routers and neighbours, and say what one listens to.
 */
static __noinline int spoof_icmpv6(struct __sk_buff *skb, const struct device *device, __u32 at,
				   bool unspecified, int checked)
{
	__u8 *type = bytes_at(skb, at, sizeof(*type));
	struct neighbor *neighbor;
	struct addr target;

	if (!type)
		return REASON_TRUNCATED;
	switch (*type) {
	case ICMP6_LISTENER_REPORT:
	case ICMP6_LISTENER_DONE:
	case ICMP6_LISTENER_REPORT_V2:
	case ICMP6_ROUTER_SOLICIT:
		return unspecified ? SPOOF_NONE : checked;
	case ICMP6_ROUTER_ADVERT:
	case ICMP6_REDIRECT:
		return checked == SPOOF_NONE ? REASON_ROUTER : checked;
	case ICMP6_NEIGHBOR_SOLICIT:
		if (!unspecified) /* of whom it likes */
			return checked;
		break;
	case ICMP6_NEIGHBOR_ADVERT:
		if (checked != SPOOF_NONE)
			return checked;
		break;
	default:
		return checked;
	}
	neighbor = bytes_at(skb, at, sizeof(*neighbor));
	if (!neighbor)
		return REASON_TRUNCATED;
	target = neighbor->target;
	return spoof_address(skb, device, &target, true) == SPOOF_NONE ? SPOOF_NONE
								       : REASON_NEIGHBOR;
}

#define EXTENSIONS 4 /* headers before the one that counts */
#define EXTENSIONS_REACH                                                                           \
	200 /* where they must end: what is behind is within what bytes_at can reach */

/* Goes to what follows the extension headers. Returns false where that cannot be seen. */
static __noinline bool spoof_skip_extensions(struct __sk_buff *skb, __u8 *protocol, __u32 *at,
					     bool *later)
{
	struct fragment_header *fragment;
	struct ipv6_opt_hdr *options;

	for (int i = 0; i < EXTENSIONS; i++) {
		switch (*protocol) {
		case IPPROTO_HOPOPTS:
		case IPPROTO_ROUTING:
		case IPPROTO_DSTOPTS:
			options = bytes_at(skb, *at, sizeof(*options));
			if (!options)
				return false;
			*protocol = options->nexthdr;
			*at += (options->hdrlen + 1) * 8;
			break;
		case IPPROTO_FRAGMENT:
			fragment = bytes_at(skb, *at, sizeof(*fragment));
			if (!fragment)
				return false;
			*protocol = fragment->next;
			*at += sizeof(*fragment);
			*later = bpf_ntohs(fragment->offset) >> 3;
			if (*later)
				return true;
			break;
		default:
			return true;
		}
		if (*at > EXTENSIONS_REACH)
			return false;
	}
	return *protocol != IPPROTO_HOPOPTS && *protocol != IPPROTO_ROUTING &&
	       *protocol != IPPROTO_DSTOPTS && *protocol != IPPROTO_FRAGMENT;
}

static __noinline int spoof_ipv6(struct __sk_buff *skb, const struct device *device, __u32 at)
{
	struct ipv6hdr *ip = bytes_at(skb, at, sizeof(*ip));
	bool unspecified, later = false;
	struct udphdr *udp;
	struct addr source;
	__u8 protocol;
	int checked;

	if (!ip || ip->version != 6)
		return REASON_TRUNCATED;
	__builtin_memcpy(&source, &ip->saddr, sizeof(source));
	protocol = ip->nexthdr;
	at += sizeof(*ip);
	unspecified = addr_is_any(&source, true);
	checked = spoof_address(skb, device, &source, true);
	if (checked != SPOOF_NONE && !unspecified)
		return checked;
	if (!spoof_skip_extensions(skb, &protocol, &at, &later))
		return REASON_HEADERS;
	if (later)
		return checked;
	if (protocol == IPPROTO_ICMPV6)
		return spoof_icmpv6(skb, device, at, unspecified, checked);
	if (protocol != IPPROTO_UDP || checked != SPOOF_NONE)
		return checked;
	udp = bytes_at(skb, at, sizeof(*udp));
	if (!udp)
		return REASON_TRUNCATED;
	return udp->dest == bpf_htons(DHCP6_CLIENT) ? REASON_DHCP_SERVER : SPOOF_NONE;
}

struct vlan_tag {
	__be16 tag;
	__be16 protocol;
};

#define VLAN_TAGS 2 /* besides the one that the kernel has taken off the frame */

static __always_inline bool is_vlan(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

/* Goes past VLAN tags, which do not change whose a frame is. Returns the EtherType behind them, or 0. */
static __always_inline __be16 spoof_skip_tags(struct __sk_buff *skb, __u32 *at)
{
	__be16 protocol = skb->protocol;
	struct vlan_tag *tag;

	for (int i = 0; i < VLAN_TAGS && is_vlan(protocol); i++) {
		tag = bytes_at(skb, *at, sizeof(*tag));
		if (!tag)
			return 0;
		protocol = tag->protocol;
		*at += sizeof(*tag);
	}
	return protocol;
}

/* Reads any frame of a container. Returns why it must not pass, or NOT_SPOOFED. */
static __noinline int spoof_check(struct __sk_buff *skb, const struct device *device)
{
	struct ethhdr *eth = bytes_at(skb, 0, sizeof(*eth));
	__u32 at = ETH_HLEN;
	__be16 protocol;

	if (!eth)
		return REASON_TRUNCATED;
	if (!mac_equal(eth->h_source, device->mac))
		return REASON_MAC;
	protocol = spoof_skip_tags(skb, &at);
	if (!protocol || is_vlan(protocol))
		return REASON_HEADERS;
	switch (protocol) {
	case bpf_htons(ETH_P_IP):
		return spoof_ipv4(skb, device, at);
	case bpf_htons(ETH_P_IPV6):
		return spoof_ipv6(skb, device, at);
	case bpf_htons(ETH_P_ARP):
		return spoof_arp(skb, device, at);
	default:
		return SPOOF_NONE; /* names no address that the host would believe */
	}
}

/* Says whether what the container behind device sends must not pass; then it is counted. */
static __always_inline bool spoof_drops(struct __sk_buff *skb, const struct device *device)
{
	int checked;

	if (!(device->flags & DEVICE_ANTI_SPOOF) || spoof_passes(skb, device))
		return false;
	checked = spoof_check(skb, device);
	if (checked == SPOOF_NONE)
		return false;
	drop_for(skb, device->owner, checked);
	return true;
}
