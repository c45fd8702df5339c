/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* A parsed packet: its headers in the representation of the maps; and its time and its next hop. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/in6.h>
#include <bpf/bpf_helpers.h>

#include "abi_fwd.h"
#include "addr.h"
#include "scratch.h"

enum refused { /* the packet, by the rules of */
	REFUSED_NOT = 0,
	REFUSED_SENT = 1,     /* its sender */
	REFUSED_RECEIVED = 2, /* its receiver */
};

/* What the last hook does about a packet whose peer from_container cannot know, because the stack may translate it. */
enum pending {
	PENDING_NOT = 0,
	PENDING_JUDGE = 1,   /* asks the rules */
	PENDING_COMPARE = 2, /* asks only about a changed packet: all rules admit the original */
};

/* What the hooks have decided about a packet. */
struct decision {
	struct addr new_addr; /* of the side that is translated, afterwards */
	__u16 new_port;
	__u8 fast_path;	   /* enum fast_path of the connection's containers */
	bool mac_checked;  /* its frame has the MAC address that anti-spoofing requires */
	bool ct_update;	   /* a conntrack update: its numbers are not the connection's */
	bool to_host;	   /* from a container, perhaps for a flow or host port of this host */
	bool end_expected; /* RST or FIN of a remote, with the expected number */
	bool bypass;	   /* to_uplink: sent by from_container, not by the stack */
	bool offloaded;	   /* the same, and the connection has a FLOW_OFFLOAD */
	bool masqueraded;  /* refused by to_uplink, and masq_scratch has the key of its FLOW_SNAT */
	bool flush_queue;  /* the first fragment, and later ones wait in frag_queue */
	__u8 flow_kind; /* not 0: of the flow that translates a remote's packet, or one that to_uplink sends */
	bool stack_cacheable; /* only the plugin's maps decide which way it goes */
	bool admitted;	      /* as TAG_JUDGED */
	bool known;	      /* by the FLOW_POLICY of its sender */
	__u8 pending;	      /* enum pending: of what its sender's rules have not decided */
	bool parsed;	      /* for policy.h: PARSED, not less */
	bool judged_later;    /* by to_container, if the rules do not admit it before */
	bool ct_nat;	      /* the host's rules translate the connection: ct_nat.h */
	bool paired;	      /* the rules of sender and receiver admit it: policy_pair.h */
	__u32 receiver;	      /* then: ifindex of that container; else 0 */
	bool as_sent; /* from_container has found that all rules admit it, and it is as it was */
	bool changed; /* by the stack: its sender knows another tuple */
	__u8 revoked; /* enum reason why its connection is no longer admitted, or 0 */
	__u8 refused; /* enum refused */
	bool reset;   /* as TAG_RESET */
	__u16 policy_generation; /* as in struct fwd_entry */
	__u32 policies;
	__u32 generation; /* of the maps, before they were read */
	/* Reasons to keep it out of the forwarding cache: */
	bool remapped; /* a port of the remote was translated */
	bool uncached; /* conntrack awaits an ACK of this side */
	bool first;    /* UDP: the first packet of its side of a flow */
};

/*
 * Ports are in host byte order, offsets and lengths in bytes.
 *
 * Two kinds of packets carry no ports of their own and get those of their
 * connection: a later fragment has the first one's, an ICMP error has those of
 * the packet it quotes. An error also gets that packet's addresses, swapped,
 * because that packet went the other way.
 */
struct packet {
	/* The key of fwd_cache: same layout as struct fwd_key. */
	struct addr src;
	struct addr dst;
	__u16 sport;
	__u16 dport;
	__u32 ifindex; /* the device whose hook runs */
	__u8 protocol;
	bool ipv6;
	bool has_ports; /* that can be translated: TCP, UDP or ICMP echo. SCTP's are only compared */
	bool echo_reply; /* end of the key */

	__u16 l3;	  /* offset of the IP header: 0 on devices without Ethernet */
	__u16 l4;	  /* offset of the header after it */
	__u16 l4_payload; /* TCP and UDP: offset after that header */
	__u8 ttl;
	bool fast_eligible; /* may bypass the stack: no fragment, no ICMP error, no IP options */
	__u32 len;	    /* of the IP packet */
	__u32 seq;	    /* TCP */
	__u32 ack;
	__u32 now;    /* now_ticks; 0: not read yet */
	bool tcp_syn; /* SYN without ACK: opens a connection */
	bool tcp_synack;
	bool tcp_fin;
	bool tcp_rst;
	bool tcp_ack;
	bool sctp_init;	       /* opens an association */
	bool sctp_abort;       /* refuses or ends one */
	bool non_first_frag;   /* a later fragment: there is no L4 header */
	bool icmp_error;       /* an ICMP error; inner_l3, inner_l4 and outer_src belong to it */
	__u32 frag_id;	       /* as in the packet */
	__u16 frag_offset;     /* in units of 8 bytes */
	__u16 inner_l3;	       /* offset of the quoted IP header */
	__u16 inner_l4;	       /* offset of the header behind it */
	bool icmp_too_big;     /* an ICMP error that lowers the path's MTU */
	struct addr outer_src; /* the sender of the error */
	__u32 id;	       /* keyed hash of the tuple (tag.h) */
	/* For parse_again: */
	bool in_stack; /* an ingress hook has left it to the stack, as this struct describes it */
	__be16 tcp_flags; /* with the header's length */
	__u32 skb_len;
	__u64 ip_start; /* the first 8 bytes of the IP header */
	struct decision decided;
};

_Static_assert(offsetof(struct packet, echo_reply) == offsetof(struct fwd_key, echo_reply),
	       "fwd_key");

/*
 * The packet that the program runs for, for entry programs, which pass it on. The
 * verifier does not track values in a map, so it does not explore every function
 * again for each kind of packet.
 */
SCRATCH(pkt_scratch, struct packet);

/*
 * Time in maps: ticks of 2^30 ns, about a second. So entries are written at most once per
 * second.
 */
#define TICK_SHIFT     30
#define TICKS(seconds) ((seconds) * 1000000000ULL >> TICK_SHIFT)

/*
 * Returns the time in ticks. The clock is read once per packet, because that takes longer than
 * a lookup.
 */
__noinline __u32 now_ticks(void)
{
	struct packet *p = pkt_scratch_get();

	if (!p)
		return 0;
	if (!p->now)
		p->now = bpf_ktime_get_ns() >> TICK_SHIFT;
	return p->now;
}

/* Where the host sends a packet. */
struct next_hop {
	__u32 ifindex;
	bool tunnel;		      /* the next hop is a node, behind the tunnel */
	__u32 max_len;		      /* largest IP packet that is known to fit, in bytes */
	struct bpf_redir_neigh neigh; /* tunnel: its address as in struct node */
};

static __always_inline bool is_tcp_or_udp(__u8 protocol)
{
	return protocol == IPPROTO_TCP || protocol == IPPROTO_UDP;
}

/* Returns the addresses and ports of a packet. */
static __always_inline const struct fwd_key *packet_tuple(const struct packet *p)
{
	return (const struct fwd_key *)p;
}

/* Sets the addresses and ports of p, but not its id. */
static __always_inline void packet_set_tuple(struct packet *p, const struct fwd_key *tuple)
{
	p->src = tuple->src;
	p->dst = tuple->dst;
	p->sport = tuple->sport;
	p->dport = tuple->dport;
}

/* Records that one side of p becomes addr:port. */
static __always_inline void packet_translate(struct packet *p, const struct addr *addr, __u16 port)
{
	p->decided.new_addr = *addr;
	p->decided.new_port = port;
}

/* Reports whether a flow translates p, received from an uplink. */
static __always_inline bool packet_is_translated(const struct packet *p)
{
	return p->decided.flow_kind &&
	       (p->decided.new_port != p->dport || !addr_equal(&p->decided.new_addr, &p->dst));
}

/*
 * Records that p, of TCP or UDP and without fragments and options, goes to the stack, with the destination
 * addr:port and so the id, for parse_again. addr may be p's.
 */
static __always_inline void packet_to_stack(struct packet *p, const struct addr *addr, __u16 port,
					    __u32 id)
{
	p->dst = *addr;
	p->dport = port;
	p->id = id;
	p->in_stack = true;
}

/* The sides of a packet, for translation. */
enum side {
	SIDE_SRC,
	SIDE_DST,
};

/* How much of a packet could be parsed. */
enum parsed {
	PARSED = 0,
	PARSED_NOT_IP,	  /* ARP and the like, or a frame for a VLAN device: never translated */
	PARSED_TRUNCATED, /* only the family is known */
	PARSED_FRAGMENT,  /* a later fragment, whose ports are unknown: the first was not seen */
	PARSED_PROTOCOL,  /* only the addresses are known: ICMP for neighbors, extension headers */
};

/* Reports whether p is a SYN (TCP) or INIT (SCTP): never a reply. */
static __always_inline bool packet_opens(const struct packet *p)
{
	return p->tcp_syn || p->sctp_init;
}

/*
 * Reports whether p may open a flow by which replies are admitted: a SYN, an INIT, or any packet
 * of a protocol without those.
 */
static __always_inline bool packet_may_open(const struct packet *p)
{
	return packet_opens(p) || (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_SCTP);
}

static __always_inline bool packet_is_icmp(const struct packet *p)
{
	return p->protocol == (p->ipv6 ? IPPROTO_ICMPV6 : IPPROTO_ICMP);
}

/* Reports whether this packet has the L4 header, and so the checksum. */
static __always_inline bool packet_has_l4(const struct packet *p)
{
	return p->has_ports && !p->non_first_frag;
}

/* Returns the sequence number after the TCP packet. */
static __always_inline __u32 packet_seq_end(const struct packet *p)
{
	__u32 payload_len = p->len + p->l3 - p->l4_payload;

	return p->seq + payload_len + p->tcp_fin + (p->tcp_syn || p->tcp_synack);
}

/* Returns the length of the IP packets on the wire: with GSO, of one segment. */
static __always_inline __u32 packet_segment_len(struct __sk_buff *skb, const struct packet *p)
{
	return skb->gso_size && p->l4_payload ? p->l4_payload - p->l3 + skb->gso_size : p->len;
}
