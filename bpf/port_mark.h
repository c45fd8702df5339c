/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* port_marks: what is known of ports (abi.h). */
#pragma once

#include "maps.h"
#include "packet.h"

/* Returns the port's mark. NULL only for the verifier. */
static __always_inline volatile __u8 *port_mark(enum port_mark mark, __u8 protocol, __u16 port)
{
	__u32 word = port / 8 + (mark + (protocol == IPPROTO_UDP)) * PORT_MARK_WORDS;
	__u8 *marks = bpf_map_lookup_elem(&port_marks, &word);

	return marks ? marks + port % 8 : NULL;
}

/* Reports whether the port has the mark. Only ports of TCP and UDP have marks. */
static __always_inline bool port_is_marked(enum port_mark mark, __u8 protocol, __u16 port)
{
	volatile __u8 *byte = is_tcp_or_udp(protocol) ? port_mark(mark, protocol, port) : NULL;

	return byte && *byte;
}

/* Reports whether the port has the mark, or could have no marks. */
static __always_inline bool port_may_be_marked(enum port_mark mark, __u8 protocol, __u16 port)
{
	return !is_tcp_or_udp(protocol) || port_is_marked(mark, protocol, port);
}

/* Reports whether the number is or was that of a host port. */
static __always_inline bool is_host_port_number(__u8 protocol, __u16 port)
{
	return port_is_marked(PORT_FORWARDED, protocol, port);
}

/* A reply port before the flow exists, because other CPUs may search for it. */
static __always_inline void port_set_mark(enum port_mark mark, __u8 protocol, __u16 port)
{
	volatile __u8 *byte = is_tcp_or_udp(protocol) ? port_mark(mark, protocol, port) : NULL;

	if (byte && !*byte)
		*byte = 1;
}
