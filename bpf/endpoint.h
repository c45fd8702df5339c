/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Containers of this host: by address (endpoints), and by the host end of their veth (devices). */
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
