/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Host ports. The map is asked for every packet, so that a change of it holds at once. */
#pragma once

#include "maps.h"
#include "parse.h"

/* The entry of a port of the host for p's protocol, or NULL. An exact address goes before any. */
static __noinline struct host_port *host_port_at(const struct addr *addr, __u16 number,
						 const struct packet *p)
{
	struct host_port_key key = {
		.addr = *addr,
		.port = number,
		.protocol = p->protocol,
		.dir = HOST_PORT_FORWARD,
	};
	struct host_port *port = bpf_map_lookup_elem(&host_ports, &key);

	if (port)
		return port;
	__builtin_memset(&key.addr, 0, sizeof(key.addr));
	if (!p->ipv6)
		addr_from_ipv4(&key.addr, 0);
	return bpf_map_lookup_elem(&host_ports, &key);
}

/* The entry that p's destination leads to, or NULL. The caller sees to it that the host is meant. */
static __always_inline struct host_port *host_port_lookup(const struct packet *p)
{
	if (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP)
		return NULL;
	if (addr_is_link_scoped(&p->dst, p->ipv6))
		return NULL;
	return host_port_at(&p->dst, p->dport, p);
}

/* The host port that leads to a container's port, or NULL; of several, the one that was there first. */
static __noinline struct host_port *host_port_reverse(const struct addr *addr, __u16 number,
						      const struct packet *p)
{
	struct host_port_key key = {
		.addr = *addr,
		.port = number,
		.protocol = p->protocol,
		.dir = HOST_PORT_REVERSE,
	};

	if (p->protocol != IPPROTO_TCP && p->protocol != IPPROTO_UDP)
		return NULL;
	return bpf_map_lookup_elem(&host_ports, &key);
}
