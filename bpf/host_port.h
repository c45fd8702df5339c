/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Lookups of host ports. They are repeated for every packet, so changes take effect at once. */
#pragma once

#include "addr.h"
#include "maps.h"
#include "packet.h"
#include "port_mark.h"

/* Returns the host port at addr:port, or NULL. An exact address takes precedence over any. */
static __noinline struct host_port *host_port_find(const struct addr *addr, __u16 port,
						   __u8 protocol, bool ipv6)
{
	struct host_port_key key = {
		.addr = *addr,
		.port = port,
		.protocol = protocol,
		.dir = HOST_PORT_FORWARD,
	};
	struct host_port *found = NULL;

	if (port_is_marked(PORT_FORWARDED_EXACT, protocol, port))
		found = bpf_map_lookup_elem(&host_ports, &key);
	if (found)
		return found;
	__builtin_memset(&key.addr, 0, sizeof(key.addr));
	if (!ipv6)
		addr_from_ipv4(&key.addr, 0);
	return bpf_map_lookup_elem(&host_ports, &key);
}

/*
 * Returns the host port that p is addressed to, or NULL. The caller must check that
 * the address is this host's, since a host port on any address matches others too.
 */
static __always_inline struct host_port *host_port_lookup(const struct packet *p)
{
	if (!is_host_port_number(p->protocol, p->dport) || addr_is_link_scoped(&p->dst, p->ipv6))
		return NULL;
	return host_port_find(&p->dst, p->dport, p->protocol, p->ipv6);
}

/* Returns the host port that is forwarded to a container's addr:port, or NULL. */
static __noinline struct host_port *host_port_reverse(const struct addr *addr, __u16 port,
						      __u8 protocol)
{
	struct host_port_key key = {
		.addr = *addr,
		.port = port,
		.protocol = protocol,
		.dir = HOST_PORT_REVERSE,
	};

	return is_tcp_or_udp(protocol) ? bpf_map_lookup_elem(&host_ports, &key) : NULL;
}

/* Returns the host port that p, sent to the outside without a flow, may be a reply of; or NULL. */
static __always_inline struct host_port *host_port_lookup_reply(const struct packet *p)
{
	struct host_port *port = NULL;

	if (!p->tcp_syn && port_is_marked(PORT_REPLIES, p->protocol, p->sport))
		port = host_port_reverse(&p->src, p->sport, p->protocol);
	return port && !addr_is_loopback(&port->target_addr, p->ipv6) ? port : NULL;
}

/* Reports whether the host port's source ranges include p's sender. */
static __noinline bool host_port_allows(const struct packet *p, const struct host_port *port)
{
	return !port->src_range_set || prefix_lookup(&prefixes, port->src_range_set, &p->src);
}
