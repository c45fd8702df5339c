/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about tuples of packets, and the forwarding cache. */
#pragma once

#include "abi.h"

/* The tuple of a packet, and where it came from: the head of struct packet. */
struct fwd_key {
	struct addr src;
	struct addr dst;
	__u16 sport;
	__u16 dport;
	__u32 ifindex; /* ingress */
	__u8 protocol;
	__u8 ipv6;
	__u8 has_ports;
	__u8 echo_reply;
};

/* clang-format off */
enum fwd_action {
	FWD_ROUTE = 0,     /* none: an answer of the routing tables (route_cache.h) */
	FWD_COUNT = 1,     /* none: packets that go through the stack are counted */
	FWD_STACK = 2,     /* through the stack, with the tag */
	FWD_FLOW = 3,      /* the same for a remote's packets, translated as long as their flow is there */
	FWD_CONTAINER = 4, /* from here on past the stack: into a container */
	FWD_NEXT_HOP = 5,  /* to the outside */
	FWD_NODE = 6,      /* to another node, by the tunnel */
} __attribute__((packed)); /* one byte */

enum fwd_nat { /* the side that becomes nat_addr:nat_port */
	FWD_NAT_NONE = 0,
	FWD_NAT_SRC = 1,
	FWD_NAT_DST = 2,
	FWD_NAT_BOTH = 3, /* the destination; and the source src_addr:src_port */
} __attribute__((packed)); /* one byte */

enum fwd_flags {
	FWD_CHECK_MAC = 1,     /* the frame must have the MAC address src_mac */
	FWD_COMPARE = 2,       /* through the stack: all rules admit packets that it does not change */
	FWD_EVERY_TCP = 4,     /* applies to packets that open or close a connection, too */
	FWD_NEW = 8,           /* the entry was made by the connection's first packet */
	FWD_KEEPS_SOURCE = 16, /* to another node, through the stack, without masquerading */
	FWD_TRACK = 32,	       /* the next packet updates the flow of the kind flow_kind, too */
	FWD_REPLY = 64,	       /* the source is the address that the client used: of a FLOW_DNAT */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/*
 * fwd_cache: the decision for the last packet with the key, on this CPU. Each bucket has
 * FWD_WAYS places; fwd_ways has the hashes of their tuples, in few cache lines.
 */
#define FWD_WAYS     2
#define FWD_BUCKETS  2048
#define FWD_NO_LIMIT 255 /* budget of a connection that stays with the stack */

struct fwd_ways {
	__u32 id[FWD_WAYS]; /* keyed hash of the tuple; 0: none */
	__u32 last;	    /* the way that was used last */
	__u32 to_stack;	    /* id of the tuple of a packet that went to the stack; 0: none */
};

struct fwd_entry {
	struct fwd_key key;
	__u32 ifindex;	  /* past the stack: egress; FWD_COMPARE: as receiver in struct routed */
	__u32 updated;	  /* in jiffies */
	__u32 generation; /* of the maps when the decision was made */
	__u32 max_len;	  /* largest IP packet known to fit, in bytes */
	__u16 tag;	  /* for the stack */
	__u8 budget;	  /* packets that still go through the stack before one is recorded */
	enum fwd_flags flags;
	enum fwd_action action;
	enum fwd_nat nat;
	__u16 nat_port;
	struct addr nat_addr;
	__u32 hint_id; /* TCP with a remote: the id of its hint in tuple_notes; else 0 */
	__u8 src_mac[6];
	__u16 policy_generation; /* the sum of those of both policies */
	__u32 policies;		 /* indexes of one or two policies that have admitted it; 0: none */
	union {
		struct {
			__u32 owner[2]; /* of the flow: both halves */
			__u32 id;	/* of the packet, translated */
		} flow;			/* FWD_FLOW; FWD_STACK, if flow_kind is FLOW_POLICY */
		__u8 macs[12];		/* FWD_CONTAINER: of the frame */
		struct bpf_redir_neigh next_hop; /* FWD_NEXT_HOP */
		struct {
			__u8 macs[12]; /* of the frame */
			struct addr remote;
		} node; /* FWD_NODE */
	};
	__u32 flow_place; /* the key in flow_table of the flow that translates the packets, plus 1; 0: not known */
	struct addr src_addr; /* FWD_NAT_BOTH */
	__u16 src_port;
	/*
	 * Not 0: of the connection's flow, which packets update: with FWD_FLOW each, else those that change its state,
	 * and those after them.
	 */
	enum flow_kind flow_kind;
	__u8 pad;
};

/*
 * routed: the tuples of packets on their way through the stack, which may translate them
 * (forward.h). Key: a part of the packet's tag.
 */
#define ROUTED_TUPLES 1024

struct routed {
	struct fwd_key tuple;
	__u32 id;	/* of the tuple; the lowest bit: all rules admit the packet as it is */
	__u32 receiver; /* then: ifindex of the container to which it is addressed; 0: the outside */
};
