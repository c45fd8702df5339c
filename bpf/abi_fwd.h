/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about forwarding: tuples of packets, the forwarding cache, the stack's hooks, other nodes. */
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

enum fwd_action {
	FWD_ROUTE = 0,	   /* none: an answer of the routing tables (route_cache.h) */
	FWD_COUNT = 1,	   /* none: packets that go through the stack are counted */
	FWD_STACK = 2,	   /* through the stack, with the tag */
	FWD_FLOW = 3,	   /* the same for a remote's packets, while their flow translates them */
	FWD_CONTAINER = 4, /* from here on past the stack: into a container */
	FWD_NEXT_HOP = 5,  /* to the outside */
	FWD_NODE = 6,	   /* to another node, by the tunnel */
} __attribute__((packed)); /* one byte */

/* The side that becomes nat_addr:nat_port. */
enum fwd_nat {
	FWD_NAT_NONE = 0,
	FWD_NAT_SRC = 1,
	FWD_NAT_DST = 2,
	FWD_NAT_BOTH = 3,  /* the destination; and the source src_addr:src_port */
} __attribute__((packed)); /* one byte */

enum fwd_flags {
	FWD_CHECK_MAC = 1,     /* the frame must have the MAC address src_mac */
	FWD_COMPARE = 2,       /* through the stack: all rules admit unchanged packets */
	FWD_EVERY_TCP = 4,     /* applies to packets that open or close a connection, too */
	FWD_NEW = 8,	       /* the entry was made by the connection's first packet */
	FWD_KEEPS_SOURCE = 16, /* to another node, through the stack, without masquerading */
	FWD_TRACK = 32,	       /* the next packet updates the flow of the kind flow_kind, too */
	FWD_REPLY = 64,	       /* the source is the address that the client used: of a FLOW_DNAT */
} __attribute__((packed));     /* one byte */

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
	__u8 epoch; /* of the hint's place (tuple_hint.h) */
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

/* What the stack has for forwarded packets: the result of the program stack_hooks. */
enum stack_hook {
	HOOK_NETFILTER = 1, /* of the family */
	HOOK_BRIDGE = 2,    /* netfilter for bridges, and one is involved */
	HOOK_IPSEC = 4,
	HOOK_NETDEV = 8,   /* a netfilter chain of a device */
	HOOK_TC = 16,	   /* tc programs or filters of others at a device */
	HOOK_UNKNOWN = 32, /* this kernel does not show its hooks */
};

/*
 * stack_notes: what the programs know of the stack for packets between two devices. It has seen
 * nothing of connections since they bypassed it without an entry, so what is recorded of it until
 * then is void.
 */
#define STACK_NOTES 1024

struct stack_note {
	__u64 hooks;	/* what it had in a jiffy (stack_hooks.h) */
	__u32 bypassed; /* in ticks of 2^30 ns: when it last had none, for fastPath auto; 0: never */
	__u32 voided; /* in such ticks: when its hooks last returned, so that all cached decisions became void */
};

/* How the host's route reaches the node's containers. */
enum node_mode {
	NODE_TUNNEL = 1,   /* by the cluster's tunnel, in both directions */
	NODE_DIRECT = 2,   /* routed, without a tunnel */
	NODE_EITHER = 3,   /* by the tunnel; packets from the node may be direct */
} __attribute__((packed)); /* one byte */

/* nodes: a prefix of containers of another node. */
struct node {
	struct addr remote; /* the node's: outer source of the prefix's packets */
	__u32 mtu;	    /* the maximum length of an IP packet to the prefix, in bytes */
	enum node_mode mode;
	__u8 pad[3];
};

/* The addresses that equal addr in the bits of mask. All zeros: every address. */
struct prefix {
	struct addr addr;
	struct addr mask;
};

/* cluster: what applies to all nodes. All zeros: the host is in no cluster. */
struct cluster {
	__u32 nodes;  /* the number of entries in nodes; 0: no lookup is made */
	__u32 tunnel; /* ifindex of the VXLAN device; 0: there is none */
	__u32 vni;
	__u16 port; /* of VXLAN */
	__u16 pad;
	struct addr addr4; /* the source of the tunnel's own packets; all zeros: the route's */
	struct addr addr6;
	struct prefix containers4; /* of this node: the only destinations of the tunnel's packets */
	struct prefix containers6;
};

_Static_assert(sizeof(struct routed) == 52, "routed");
_Static_assert(sizeof(struct stack_note) == 16, "stack_note");
_Static_assert(sizeof(struct fwd_key) == 44, "fwd_key");
_Static_assert(sizeof(struct fwd_ways) == 16, "fwd_ways");
_Static_assert(sizeof(struct fwd_entry) == 152, "fwd_entry");
