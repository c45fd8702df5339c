/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about other nodes of a cluster. */
#pragma once

#include "abi.h"

/* clang-format off */
enum node_mode { /* how the host's route reaches the node's containers */
	NODE_TUNNEL = 1, /* by the cluster's tunnel, as theirs reaches this host's */
	NODE_DIRECT = 2, /* as any other network */
	NODE_EITHER = 3, /* by the tunnel, but theirs may be direct */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/* nodes: a prefix of containers of another node. */
struct node {
	struct addr
		remote; /* the node's address: what the tunnel receives of the prefix is from it */
	__u32 mtu;	/* the longest IP packet to the prefix, in bytes */
	enum node_mode mode;
	__u8 pad[3];
};

/* The addresses that are addr where mask has ones. All zeros: every address. */
struct prefix {
	struct addr addr;
	struct addr mask;
};

/* cluster: what holds for all nodes. All zeros: the host is in no cluster. */
struct cluster {
	__u32 nodes;  /* how many entries nodes has; 0: nothing is looked up */
	__u32 tunnel; /* ifindex of the VXLAN device; 0: there is none */
	__u32 vni;
	__u16 port; /* of VXLAN */
	__u16 pad;
	struct addr addr4; /* the source of the tunnel's own packets; all zeros: the route's */
	struct addr addr6;
	struct prefix containers4; /* of this node: what the tunnel receives is for them */
	struct prefix containers6;
};

_Static_assert(sizeof(struct node) == 24, "node");
_Static_assert(sizeof(struct cluster) == 112, "cluster");
