/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * antiSpoof: a container sends from its own MAC and addresses only, and announces no
 * others by ARP, neighbor discovery or DHCP. It is checked before parse_fragment, which
 * records the ports of fragments by their addresses. Plain packets are compared with
 * the device's entry. All others are read to the end of their headers, and dropped
 * if that is impossible (RFC 7113, 2.1). This file has its own parser, because it reads
 * VLAN tags and more extension headers than parse.h.
 */
#pragma once

#include "endpoint.h"
#include "fib.h"
#include "hash.h"
#include "parse_icmp.h"
#include "tunnel.h"
#include "verdict.h"

#define DHCP4_SERVER 67
#define DHCP4_CLIENT 68
#define DHCP6_CLIENT 546

/*
 * Reports whether p is TCP or UDP with plain headers, not for DHCP or a tunnel: only source
 * and MAC are checked.
 */
static __always_inline bool spoof_is_plain(const struct packet *p)
{
	if (!p->fast_eligible ||
	    (p->ipv6 && p->src.bytes[0] < 0x20)) /* ::, as an unset address of the device */
		return false;
	if (p->protocol != IPPROTO_UDP)
		return p->protocol == IPPROTO_TCP;
	return p->dport != DHCP4_CLIENT && p->dport != DHCP6_CLIENT &&
	       !is_tunnel_port(bpf_htons(p->dport));
}

/*
 * Reports whether p is plain, and from the container's MAC and one of its first addresses, as
 * most packets.
 */
static __always_inline bool spoof_is_plain_own(struct __sk_buff *skb, const struct packet *p,
					       const struct device *device)
{
	struct ethhdr *eth;

	if (!spoof_is_plain(p))
		return false;
	if (!addr_equal(&p->src, &device->addr4) && !addr_equal(&p->src, &device->addr6))
		return false;
	eth = linear_at(skb, 0, sizeof(*eth));
	return eth && mac_equal(eth->h_source, device->mac);
}

/*
 * Reports whether the address is the container's, on any of its interfaces, because its routes
 * choose the one to reply by. A container without addresses may use any that neither
 * another container nor the host has.
 */
static __always_inline bool spoof_owns(struct __sk_buff *skb, const struct device *device,
				       const struct addr *addr, bool ipv6)
{
	struct endpoint *endpoint = endpoint_lookup(addr);

	if (endpoint)
		return endpoint->container == device->container;
	return device->flags & DEVICE_ANY_ADDRESS && !addr_is_loopback(addr, ipv6) &&
	       !fib_is_local_addr(skb, addr, ipv6);
}

/* Reports whether the address is a gateway's, or fe80::1, the host's on every veth. */
static __always_inline bool spoof_is_gateway(const struct device *device, const struct addr *addr)
{
	const __u32 *words = (const __u32 *)addr;

	return addr_equal(addr, &device->gateway4) || addr_equal(addr, &device->gateway6) ||
	       (words[0] == bpf_htonl(0xfe800000) && !words[1] && !words[2] &&
		words[3] == bpf_htonl(1));
}

/* Reports whether the address is formed from the MAC (EUI-64; RFC 4291, appendix A). */
static __always_inline bool addr_is_eui64(const struct addr *addr, const __u8 *mac)
{
	const __u8 *id = addr->bytes + 8;

	return !((const __u32 *)addr)[1] && id[0] == (mac[0] ^ 2) && id[1] == mac[1] &&
	       id[2] == mac[2] && id[3] == 0xff && id[4] == 0xfe && id[5] == mac[3] &&
	       id[6] == mac[4] && id[7] == mac[5];
}

/*
 * Reports whether the container may use the link-local address: its MAC's, and alone on its link
 * the first other one that it uses or probes for, such as a stable private address (RFC 7217).
 * More would fill the kernel's table of neighbors, which all containers and the host share.
 */
static __always_inline bool spoof_owns_link_local(struct device *device, const struct addr *addr)
{
	__u32 id;

	if (addr->bytes[0] != 0xfe || (addr->bytes[1] & 0xc0) != 0x80)
		return false;
	if (addr_is_eui64(addr, device->mac))
		return true;
	if (device->flags & DEVICE_BRIDGED)
		return false;
	id = hash_secret(addr, addr, 0) | 1;
	if (!device->link_local)
		device->link_local = id;
	return device->link_local == id;
}

/* Checks an address that the container uses as its own. */
static __noinline int spoof_check_addr(struct __sk_buff *skb, struct device *device,
				       const struct addr *addr, bool ipv6)
{
	if (spoof_is_gateway(device, addr))
		return REASON_GATEWAY;
	if (addr_is_any(addr, ipv6) || (ipv6 && addr_is_mapped(addr)))
		return REASON_ADDRESS;
	if (spoof_owns(skb, device, addr, ipv6) || (ipv6 && spoof_owns_link_local(device, addr)))
		return REASON_NONE;
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

/* Checks the sender's address; in an ARP probe, which has none (RFC 5227), the target's. */
static __noinline int spoof_check_arp(struct __sk_buff *skb, struct device *device, __u32 offset)
{
	struct arp_ipv4 *arp = bytes_at(skb, offset, sizeof(*arp));
	struct addr addr;

	if (!arp)
		return REASON_TRUNCATED;
	if (arp->hardware != bpf_htons(ARP_ETHERNET) || arp->protocol != bpf_htons(ETH_P_IP) ||
	    arp->hardware_length != ETH_ALEN || arp->protocol_length != sizeof(arp->sender) ||
	    !mac_equal(arp->sender_mac, device->mac))
		return REASON_ARP;
	addr_from_ipv4(&addr, arp->sender ?: arp->target);
	return spoof_check_addr(skb, device, &addr, false) == REASON_NONE ? REASON_NONE
									  : REASON_ARP;
}

#define ICMP4_REDIRECT	    5
#define ICMP4_ROUTER_ADVERT 9

/*
 * Checks that the packet that an ICMP error quotes, whose IP header is at offset, was sent to
 * the container. A container may report errors only about packets that it received.
 */
static __noinline int spoof_check_error(struct __sk_buff *skb, struct device *device, __u32 offset,
					bool ipv6)
{
	struct iphdr *ip4;
	struct ipv6hdr *ip6;
	struct addr receiver;

	if (ipv6) {
		ip6 = bytes_at(skb, offset, sizeof(*ip6));
		if (!ip6)
			return REASON_TRUNCATED;
		__builtin_memcpy(&receiver, &ip6->daddr, sizeof(receiver));
	} else {
		ip4 = bytes_at(skb, offset, sizeof(*ip4));
		if (!ip4)
			return REASON_TRUNCATED;
		addr_from_ipv4(&receiver, ip4->daddr);
	}
	return spoof_check_addr(skb, device, &receiver, ipv6) == REASON_NONE ? REASON_NONE
									     : REASON_ICMP_ERROR;
}

static __noinline int spoof_check_ipv4(struct __sk_buff *skb, struct device *device, __u32 offset)
{
	struct iphdr *ip = bytes_at(skb, offset, sizeof(*ip));
	struct flow_key key = {}; /* from remote to local */
	struct udphdr *udp;
	__u8 protocol, *icmp;
	bool non_first_frag;
	int reason;

	if (!ip || ip->version != 4 || ip->ihl < 5)
		return REASON_TRUNCATED;
	addr_from_ipv4(&key.remote, ip->saddr);
	addr_from_ipv4(&key.local, ip->daddr);
	protocol = ip->protocol;
	non_first_frag = ip->frag_off & bpf_htons(IPV4_OFFSET_MASK);
	offset += ip->ihl * 4;
	reason = spoof_check_addr(skb, device, &key.remote, false);
	if (non_first_frag)
		return reason;
	if (is_open_tunnel(protocol) && reason == REASON_NONE)
		return tunnel_check(skb, &key.local, false);
	if (protocol == IPPROTO_ICMP && reason == REASON_NONE) {
		icmp = bytes_at(skb, offset, sizeof(*icmp));
		if (!icmp)
			return REASON_TRUNCATED;
		if (*icmp == ICMP4_ROUTER_ADVERT || *icmp == ICMP4_REDIRECT)
			return REASON_ROUTER;
		if (icmp_type_is_error(*icmp, false))
			return spoof_check_error(skb, device, offset + sizeof(struct echohdr),
						 false);
	}
	if (protocol != IPPROTO_UDP)
		return reason;
	udp = bytes_at(skb, offset, sizeof(*udp));
	if (!udp)
		return REASON_TRUNCATED;
	if (reason == REASON_NONE && udp->dest == bpf_htons(DHCP4_CLIENT))
		return REASON_DHCP_SERVER;
	if (reason == REASON_NONE && is_tunnel_port(udp->dest))
		return tunnel_check_udp(skb, &key, udp, false);
	if (!addr_ipv4(&key.remote) && udp->source == bpf_htons(DHCP4_CLIENT) &&
	    udp->dest == bpf_htons(DHCP4_SERVER)) /* a DHCP client without an address */
		return REASON_NONE;
	return reason;
}

struct neighbor {
	__u8 type;
	__u8 code;
	__sum16 checksum;
	__be32 flags;
	struct addr target;
};

/*
 * Checks ICMPv6; reason is the result for its source. The unspecified address may
 * only solicit routers and neighbors, and report listeners.
 */
static __noinline int spoof_check_icmpv6(struct __sk_buff *skb, struct device *device, __u32 offset,
					 bool unspecified, int reason)
{
	__u8 *type = bytes_at(skb, offset, sizeof(*type));
	struct neighbor *neighbor;
	struct addr target;

	if (!type)
		return REASON_TRUNCATED;
	if (reason == REASON_NONE && icmp_type_is_error(*type, true))
		return spoof_check_error(skb, device, offset + sizeof(struct echohdr), true);
	switch (*type) {
	case ICMP6_MLD_REPORT:
	case ICMP6_MLD_DONE:
	case ICMP6_MLD2_REPORT:
	case ICMP6_ROUTER_SOLICIT:
		return unspecified ? REASON_NONE : reason;
	case ICMP6_ROUTER_ADVERT:
	case ICMP6_REDIRECT:
		return reason == REASON_NONE ? REASON_ROUTER : reason;
	case ICMP6_NEIGHBOR_SOLICIT:
		if (!unspecified) /* the target is another's address */
			return reason;
		break;
	case ICMP6_NEIGHBOR_ADVERT:
		if (reason != REASON_NONE)
			return reason;
		break;
	default:
		return reason;
	}
	neighbor = bytes_at(skb, offset, sizeof(*neighbor));
	if (!neighbor)
		return REASON_TRUNCATED;
	target = neighbor->target;
	return spoof_check_addr(skb, device, &target, true) == REASON_NONE ? REASON_NONE
									   : REASON_NEIGHBOR;
}

#define EXTENSIONS_MAX	   4   /* extension headers that are skipped */
#define EXTENSIONS_MAX_END 200 /* offset where they must end: bytes_at must reach what follows */

/* Skips extension headers. Returns false if the header behind them cannot be reached. */
static __noinline bool spoof_skip_extensions(struct __sk_buff *skb, __u8 *protocol, __u32 *offset,
					     bool *non_first_frag)
{
	struct fragment_header *fragment;
	struct ipv6_opt_hdr *options;

	for (int i = 0; i < EXTENSIONS_MAX; i++) {
		switch (*protocol) {
		case IPPROTO_HOPOPTS:
		case IPPROTO_ROUTING:
		case IPPROTO_DSTOPTS:
			options = bytes_at(skb, *offset, sizeof(*options));
			if (!options)
				return false;
			*protocol = options->nexthdr;
			*offset += (options->hdrlen + 1) * 8;
			break;
		case IPPROTO_FRAGMENT:
			fragment = bytes_at(skb, *offset, sizeof(*fragment));
			if (!fragment)
				return false;
			*protocol = fragment->next;
			*offset += sizeof(*fragment);
			*non_first_frag = bpf_ntohs(fragment->offset) >> 3;
			if (*non_first_frag)
				return true;
			break;
		default:
			return true;
		}
		if (*offset > EXTENSIONS_MAX_END)
			return false;
	}
	return *protocol != IPPROTO_HOPOPTS && *protocol != IPPROTO_ROUTING &&
	       *protocol != IPPROTO_DSTOPTS && *protocol != IPPROTO_FRAGMENT;
}

static __noinline int spoof_check_ipv6(struct __sk_buff *skb, struct device *device, __u32 offset)
{
	struct ipv6hdr *ip = bytes_at(skb, offset, sizeof(*ip));
	bool unspecified, non_first_frag = false;
	struct flow_key key = {}; /* from remote to local */
	struct udphdr *udp;
	__u8 protocol;
	int reason;

	if (!ip || ip->version != 6)
		return REASON_TRUNCATED;
	__builtin_memcpy(&key.remote, &ip->saddr, sizeof(key.remote));
	__builtin_memcpy(&key.local, &ip->daddr, sizeof(key.local));
	protocol = ip->nexthdr;
	offset += sizeof(*ip);
	unspecified = addr_is_any(&key.remote, true);
	reason = spoof_check_addr(skb, device, &key.remote, true);
	if (reason != REASON_NONE && !unspecified)
		return reason;
	if (!spoof_skip_extensions(skb, &protocol, &offset, &non_first_frag))
		return REASON_HEADERS;
	if (non_first_frag)
		return reason;
	if (protocol == IPPROTO_ICMPV6)
		return spoof_check_icmpv6(skb, device, offset, unspecified, reason);
	if (reason != REASON_NONE)
		return reason;
	if (is_open_tunnel(protocol))
		return tunnel_check(skb, &key.local, true);
	if (protocol != IPPROTO_UDP)
		return reason;
	udp = bytes_at(skb, offset, sizeof(*udp));
	if (!udp)
		return REASON_TRUNCATED;
	if (is_tunnel_port(udp->dest))
		return tunnel_check_udp(skb, &key, udp, true);
	return udp->dest == bpf_htons(DHCP6_CLIENT) ? REASON_DHCP_SERVER : REASON_NONE;
}

/*
 * Checks a frame that is neither IP nor ARP. Behind a bridge, a container must not act as a
 * switch: it sends no 802.2 frames (spanning tree and the like), and none to the addresses
 * reserved for bridges (802.1Q, 8.6.3).
 */
static __noinline int spoof_check_other(struct __sk_buff *skb, const struct device *device,
					__be16 protocol)
{
	struct ethhdr *eth = bytes_at(skb, 0, sizeof(*eth));

	if (!(device->flags & DEVICE_BRIDGED))
		return REASON_NONE;
	if (!eth)
		return REASON_TRUNCATED;
	if (bpf_ntohs(protocol) < ETH_P_802_3_MIN || mac_is_bridges(eth->h_dest))
		return REASON_BRIDGE;
	return REASON_NONE;
}

struct vlan_tag {
	__be16 tag;
	__be16 protocol;
};

#define VLAN_TAGS_MAX 2 /* besides the one that the kernel has removed from the frame */

static __always_inline bool is_vlan(__be16 protocol)
{
	return protocol == bpf_htons(ETH_P_8021Q) || protocol == bpf_htons(ETH_P_8021AD);
}

/* Skips VLAN tags. Returns the EtherType behind them, or 0 if the frame is too short. */
static __always_inline __be16 spoof_skip_tags(struct __sk_buff *skb, __u32 *offset)
{
	__be16 protocol = skb->protocol;
	struct vlan_tag *tag;

	for (int i = 0; i < VLAN_TAGS_MAX && is_vlan(protocol); i++) {
		tag = bytes_at(skb, *offset, sizeof(*tag));
		if (!tag)
			return 0;
		protocol = tag->protocol;
		*offset += sizeof(*tag);
	}
	return protocol;
}

/* Checks any frame of the container behind its device. */
__noinline int spoof_check_frame(struct __sk_buff *skb)
{
	struct device *device = device_lookup(skb->ifindex);
	struct ethhdr *eth = bytes_at(skb, 0, sizeof(*eth));
	__u32 offset = ETH_HLEN;
	__be16 protocol;

	if (!eth || !device)
		return REASON_TRUNCATED;
	if (!mac_equal(eth->h_source, device->mac))
		return REASON_MAC;
	protocol = spoof_skip_tags(skb, &offset);
	if (!protocol || is_vlan(protocol))
		return REASON_HEADERS;
	switch (protocol) {
	case bpf_htons(ETH_P_IP):
		return spoof_check_ipv4(skb, device, offset);
	case bpf_htons(ETH_P_IPV6):
		return spoof_check_ipv6(skb, device, offset);
	case bpf_htons(ETH_P_ARP):
		return spoof_check_arp(skb, device, offset);
	default:
		return spoof_check_other(skb, device, protocol);
	}
}

/*
 * Returns why the frame of the container behind device must be dropped, or
 * REASON_NONE. p has the fields that could be parsed.
 */
static __always_inline int spoof_check(struct __sk_buff *skb, struct packet *p, int parsed,
				       const struct device *device)
{
	p->decided.mac_checked = device->flags & DEVICE_ANTI_SPOOF;
	if (!p->decided.mac_checked || (parsed == PARSED && spoof_is_plain_own(skb, p, device)))
		return REASON_NONE;
	return spoof_check_frame(skb);
}
