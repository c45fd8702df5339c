/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The host's external interfaces. */
#pragma once

#include <stdbool.h>

#include "maps.h"

/* Returns the entry of an uplink or of a container bridge, or NULL. */
static __always_inline struct uplink *uplink_lookup(__u32 ifindex)
{
	return bpf_map_lookup_elem(&uplinks, &ifindex);
}

/* Reports whether the device is an uplink, with programs. */
static __always_inline bool is_uplink(__u32 ifindex)
{
	struct uplink *uplink = uplink_lookup(ifindex);

	return uplink && !uplink->container_bridge;
}

/*
 * Reports whether the uplink is a bridge: br_netfilter has passed its packets to rules and
 * conntrack before a program could translate them.
 */
static __always_inline bool is_bridge(__u32 ifindex)
{
	struct uplink *uplink = uplink_lookup(ifindex);

	return uplink && uplink->bridge;
}
