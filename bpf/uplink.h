/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The host's external interfaces. */
#pragma once

#include <stdbool.h>

#include "maps.h"

/* Also returns the entries of container bridges, which are no uplinks. */
static __always_inline struct uplink *uplink_lookup(__u32 ifindex)
{
	return bpf_map_lookup_elem(&uplinks, &ifindex);
}

/* Our programs run on the device, so traffic leaving it is masqueraded. */
static __always_inline bool is_uplink(__u32 ifindex)
{
	struct uplink *uplink = uplink_lookup(ifindex);

	return uplink && !uplink->container_bridge;
}

/*
 * br_netfilter has shown rules and conntrack the packet that the bridge has received,
 * before a program could translate it.
 */
static __always_inline bool is_bridge(__u32 ifindex)
{
	struct uplink *uplink = uplink_lookup(ifindex);

	return uplink && uplink->bridge;
}
