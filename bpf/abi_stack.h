/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The part of abi.h about what the host's stack does with forwarded packets. */
#pragma once

#include <linux/types.h>

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
	__u32 pad;
};
