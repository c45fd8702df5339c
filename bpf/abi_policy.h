/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about policies: who may open connections to and from a container. */
#pragma once

#include <linux/types.h>

/*
 * Entry 0 of policies belongs to no container: which checks packets need on this host. In other entries
 * only POLICY_POD has a meaning, for user space.
 */
enum policy_checks {
	POLICY_CHECK_ANY = 1,  /* a container has rules, or has had */
	POLICY_CHECK_HOST = 2, /* a container does not admit its own node, or has not */
	POLICY_POD = 4,	       /* the owner is a pod, and the node agent frees the entry */
};

/*
 * policies: the policy of a container, by the index in its device's entry. One store into
 * the word rule_sets switches both directions. User space maps it, and writes single words.
 */
struct policy {
	__u64 owner;	  /* the attachment's or the pod's token; 0: the entry is free */
	__u64 rule_sets;  /* references: ingress in the lower half, egress in the upper one */
	__u32 generation; /* changes when something that was admitted no longer is */
	enum policy_checks checks;
};

#define POLICIES 8192

/*
 * A reference to a rule set: its id, shifted left by RULE_SET_SHIFT, and flags. 0: the
 * direction is not isolated.
 */
#define RULE_SET_SHIFT 8

/* The kind of a rule's peers. */
enum peer_kind {
	PEER_ANY = 0,	   /* but the own node */
	PEER_OUTSIDE = 1,  /* no container of this host, and not the host */
	PEER_NETWORK = 2,  /* containers of this host in the network with the token */
	PEER_CLASS = 3,	   /* pods: the class of the address in peer_classes */
	PEER_BLOCK = 4,	   /* the block of the address in policy_blocks */
} __attribute__((packed)); /* one byte */

/* In a reference. The lowest bits: 1 << enum peer_kind if the rule set has such rules. */
enum rule_set_flags {
	RULE_SET_HOST = 32,  /* the container's own node is admitted */
	RULE_SET_AUDIT = 64, /* what is not admitted is reported, and passes */
};

/*
 * policy_rules: what rule sets admit. The longest match decides, and all entries admit. A rule for
 * every protocol has the prefix length RULE_ANY_PROTOCOL, one for all ports RULE_ANY_PORT.
 */
struct rule_key {
	__u32 prefixlen;
	__u32 set;  /* the rule set's id */
	__u32 peer; /* token, class, or number of the block; else 0 */
	enum peer_kind kind;
	__u8 protocol;
	__u8 port[2]; /* in network order */
};

#define RULE_ANY_PROTOCOL 72
#define RULE_ANY_PORT	  80
#define RULE_ONE_PORT	  96

/* The number of the rule in the container's policy, to explain the verdict. */
struct rule {
	__u32 number;
};

/* rule_sets: what is known of each rule set, by its id. Equal ones are stored once. */
struct rule_set {
	__u8 digest[16];	   /* of the content */
	enum rule_set_flags flags; /* of its first reference; others may differ in these */
};
