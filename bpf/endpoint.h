/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What is at a packet's ends: containers of this host, by address (endpoints) and by the host end of their veth (devices), and uplinks. */
#pragma once

#include <stdbool.h>

#include "maps.h"

static __always_inline struct endpoint *endpoint_lookup(const struct addr *addr)
{
	return bpf_map_lookup_elem(&endpoints, addr);
}

static __always_inline bool endpoint_is_owned_by(const struct addr *addr, __u64 owner)
{
	struct endpoint *endpoint = endpoint_lookup(addr);

	return endpoint && endpoint->owner == owner;
}

/* Returns the device's entry, or NULL if it is not a container's. */
static __always_inline struct device *device_lookup(__u32 ifindex)
{
	return bpf_map_lookup_elem(&devices, &ifindex);
}

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

/*
 * Reports whether what the device has received has passed a program of ours; 0: the host itself has sent it.
 */
static __always_inline bool is_guarded(__u32 ifindex)
{
	return !ifindex || device_lookup(ifindex) || is_uplink(ifindex);
}
