/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about dropped packets: counters, and single drops. */
#pragma once

#include <linux/types.h>

/*
 * drop_totals: dropped packets by reason. Key: enum reason.
 * drops: dropped packets of one attachment, by reason.
 */
struct drop_count {
	__u64 packets;
	__u64 bytes;
};

enum reason {
	REASON_NO_SOURCE = 0,	    /* the uplink has no address to masquerade with */
	REASON_NO_PORT = 1,	    /* no port for this remote, or no place in flow_table */
	REASON_FRAGMENT = 2,	    /* a fragment without its first one */
	REASON_PROTOCOL = 3,	    /* cannot be masqueraded */
	REASON_TRUNCATED = 4,	    /* shorter than its headers say */
	REASON_REWRITE = 5,	    /* the kernel refused to change the packet, or had no memory */
	REASON_NO_FLOW = 6,	    /* of a translated connection without an entry */
	REASON_MAC = 7,		    /* antiSpoof: source MAC is not the container's */
	REASON_ADDRESS = 8,	    /* antiSpoof: source address is not the container's */
	REASON_GATEWAY = 9,	    /* antiSpoof: source address is the gateway's */
	REASON_ARP = 10,	    /* antiSpoof: ARP for another address */
	REASON_NEIGHBOR = 11,	    /* antiSpoof: neighbor discovery for another address */
	REASON_ROUTER = 12,	    /* antiSpoof: router advertisement or redirect */
	REASON_DHCP_SERVER = 13,    /* antiSpoof: DHCP server message */
	REASON_HEADERS = 14,	    /* antiSpoof: headers that hide the one behind them */
	REASON_POLICY_INGRESS = 15, /* the receiver's rules do not admit the sender */
	REASON_SRC_RANGE = 16,	    /* to a host port whose source ranges exclude the client */
	REASON_ICMP_ERROR = 17,	    /* an ICMP error about a connection of others */
	REASON_NEXT_HOP = 18,	    /* the gateway of the container's route is not here */
	REASON_TUNNEL = 19,	    /* antiSpoof: to a tunnel of the host, or under its address */
	REASON_BRIDGE = 20,	    /* antiSpoof: a message for bridges, such as spanning tree */
	REASON_NODE = 21, /* not from the node of its source, or for no container of this node */
	REASON_NO_ENDPOINT = 22,   /* from another node, to an address that no container has */
	REASON_OWN_SOURCE = 23,	   /* from outside, with the address of a container of this host */
	REASON_POLICY_EGRESS = 24, /* the sender's rules do not admit the receiver */
	REASON_POLICY_AUDIT = 25,  /* not dropped: rules in audit mode do not admit it */
	REASON_NO_OFFLOAD = 26,	   /* not dropped: no place in flow_table for the fast path */
	REASON_MAX = 27,
};

struct drop_key {
	__u64 owner;
	enum reason reason;
	__u32 pad;
};

#define DROP_REASONS 64 /* more than REASON_MAX, so that reasons can be added */
#define DROP_STACK   63 /* instead of a reason: dropped by the host's stack */
#define DROP_OWNERS  8
#define DROP_BYTES   256

/*
 * drop_reader: the process that reads single drops, and its filter. Without a reader, nothing
 * is written to drop_events and drop_limits. A reader renews its lease, so the lease of a killed
 * one soon ends.
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
	__u64 events;	/* in this second, including those left out */
	__u64 left_out; /* since the map exists: beyond the limit, or with a full ring */
	__u64 ours;	/* DROP_STACK: when a program last dropped a packet on this CPU */
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

_Static_assert(sizeof(struct drop_event) == 48 + DROP_BYTES, "drop_event");
_Static_assert((int)REASON_MAX <= DROP_STACK, "drop_limits");
