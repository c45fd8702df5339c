/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about other nodes of a cluster. */
#pragma once

#include "abi.h"

/* clang-format off */
enum node_mode { /* how the host's route reaches the node's containers */
	NODE_TUNNEL = 1, /* by the cluster's tunnel, in both directions */
	NODE_DIRECT = 2, /* routed, without a tunnel */
	NODE_EITHER = 3, /* by the tunnel; packets from the node may be direct */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/* nodes: a prefix of containers of another node. */
struct node {
	struct addr
		remote; /* the node's address: the outer source of the prefix's packets in the tunnel */
	__u32 mtu;	/* the maximum length of an IP packet to the prefix, in bytes */
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

_Static_assert(sizeof(struct node) == 24, "node");
_Static_assert(sizeof(struct cluster) == 112, "cluster");
