/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about dropped packets: counters, and single drops. */
#pragma once

#include <linux/types.h>

/*
 * drop_totals: dropped packets by reason. Key: enum reason.
 * drops: the same for one attachment.
 */
struct drop_count {
	__u64 packets;
	__u64 bytes;
};

enum reason {
	REASON_NO_SOURCE = 0,	 /* the uplink has no address to masquerade with */
	REASON_NO_PORT = 1,	 /* every candidate port for this remote is taken */
	REASON_FRAGMENT = 2,	 /* a fragment without its first one */
	REASON_PROTOCOL = 3,	 /* cannot be masqueraded */
	REASON_TRUNCATED = 4,	 /* shorter than its headers say */
	REASON_REWRITE = 5,	 /* the kernel refused to change the packet, or had no memory */
	REASON_NO_FLOW = 6,	 /* of a translated connection that is no longer known */
	REASON_MAC = 7,		 /* antiSpoof: source MAC is not the container's */
	REASON_ADDRESS = 8,	 /* antiSpoof: source address is not the container's */
	REASON_GATEWAY = 9,	 /* antiSpoof: source address is the gateway's */
	REASON_ARP = 10,	 /* antiSpoof: ARP for another address */
	REASON_NEIGHBOR = 11,	 /* antiSpoof: neighbor discovery for another address */
	REASON_ROUTER = 12,	 /* antiSpoof: router advertisement or redirect */
	REASON_DHCP_SERVER = 13, /* antiSpoof: DHCP server message */
	REASON_HEADERS = 14,	 /* antiSpoof: headers that hide the one behind them */
	REASON_POLICY = 15,	 /* from a container that ingressPolicy does not admit */
	REASON_SRC_RANGE = 16,	 /* to a host port whose source ranges exclude the client */
	REASON_ICMP_ERROR = 17,	 /* an ICMP error about a connection of others */
	REASON_NEXT_HOP = 18,	 /* the gateway of the container's route is not here */
	REASON_TUNNEL = 19,	 /* antiSpoof: for a tunnel of the host; or in its name */
	REASON_BRIDGE = 20,	 /* antiSpoof: a message for bridges, such as spanning tree */
	REASON_NODE = 21,	 /* not from its source's node, or for no container here */
	REASON_MAX = 22,
};

struct drop_key {
	__u64 owner;
	enum reason reason;
	__u32 pad;
};

#define DROP_REASONS 64 /* room for more reasons */
#define DROP_STACK   63 /* in the place of a reason: dropped by the host's stack */
#define DROP_OWNERS  8
#define DROP_BYTES   256

/*
 * drop_reader: who looks at single drops, and at which. Without one nothing is written to
 * drop_events and drop_limits. A reader prolongs its time, so one that is killed is soon gone.
 */
struct drop_reader {
	__u64 until;		  /* in ns since boot; 0: there is none */
	__u64 reasons;		  /* a bit for each */
	__u64 owner[DROP_OWNERS]; /* of one container; all 0: of all containers */
	__u32 limit;		  /* of events per second, CPU and reason */
	__u32 pid;
};

/* drop_limits: what a CPU has written of one reason. Key: enum reason, or DROP_STACK. */
struct drop_limit {
	__u64 began;	/* a second, in ns since boot */
	__u64 events;	/* in it, also those left out */
	__u64 left_out; /* ever: beyond the limit, or without room */
	__u64 ours;	/* DROP_STACK: when a program has last dropped a packet on this CPU */
};

/* drop_events: a dropped packet. */
struct drop_event {
	__u64 time;	/* in ns since boot */
	__u64 owner;	/* 0: the host, or unknown */
	__u64 location; /* in the host's stack */
	__u32 reason;	/* enum reason, or the kernel's number */
	__u32 ifindex;
	__u32 ingress_ifindex;
	__u32 len; /* of the packet */
	__u16 l3;  /* where the IP header is in bytes */
	__u16 captured;
	__be16 protocol; /* EtherType */
	__u8 by_stack;
	__u8 pad;
	__u8 bytes[DROP_BYTES];
};

_Static_assert(sizeof(struct drop_key) == 16, "drop_key");
_Static_assert(sizeof(struct drop_count) == 16, "drop_count");
_Static_assert(sizeof(struct drop_reader) == 88, "drop_reader");
_Static_assert(sizeof(struct drop_limit) == 32, "drop_limit");
_Static_assert(sizeof(struct drop_event) == 48 + DROP_BYTES, "drop_event");
_Static_assert((int)REASON_MAX <= DROP_STACK, "drop_limits");
