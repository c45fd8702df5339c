/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* reply_ports: whether a container's port may have a flow that a remote has opened (FLOW_DNAT). */
#pragma once

#include "maps.h"
#include "packet.h"

/* Returns the port's mark. NULL only for the verifier. */
static __always_inline volatile __u8 *reply_port_mark(__u8 protocol, __u16 port)
{
	__u32 word = port / 8 + (protocol == IPPROTO_UDP ? REPLY_PORT_WORDS : 0);
	__u8 *marks = bpf_map_lookup_elem(&reply_ports, &word);

	return marks ? marks + port % 8 : NULL;
}

/* Reports whether packets from the port may be replies. */
static __always_inline bool reply_port_is_used(__u8 protocol, __u16 port)
{
	volatile __u8 *mark = is_tcp_or_udp(protocol) ? reply_port_mark(protocol, port) : NULL;

	return !mark || *mark;
}

/* Before the flow exists, because other CPUs may search for it. */
static __always_inline void reply_port_record(__u8 protocol, __u16 port)
{
	volatile __u8 *mark = is_tcp_or_udp(protocol) ? reply_port_mark(protocol, port) : NULL;

	if (mark && !*mark)
		*mark = 1;
}
