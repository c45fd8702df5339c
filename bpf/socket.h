/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Lookups of the host's sockets, whose packets must not be translated. */
#pragma once

#include "addr.h"
#include "flow_state.h"

enum host_socket {
	SOCKET_NONE,
	SOCKET_LISTENING, /* or an unconnected UDP socket */
	SOCKET_CONNECTED, /* to this remote */
};

/*
 * Reports whether a UDP socket accepts packets from any remote. Never inlined: as an argument, struct
 * bpf_sock is whole in BTF. Where only struct __sk_buff refers to types, clang orders them by their
 * address in its memory, and the object depends on the path of the source.
 */
static __noinline bool udp_socket_is_unconnected(struct bpf_sock *sk)
{
	return !sk->dst_port;
}

/*
 * Looks up the socket that receives packets from remote to local in key. The protocol is TCP
 * or UDP.
 */
static __noinline enum host_socket socket_lookup(struct __sk_buff *skb, const struct flow_key *key,
						 bool ipv6)
{
	struct bpf_sock_tuple tuple = {};
	enum host_socket found = SOCKET_CONNECTED;
	struct bpf_sock *sk;
	__u32 size;

	if (ipv6) {
		size = sizeof(tuple.ipv6);
		__builtin_memcpy(tuple.ipv6.saddr, &key->remote, sizeof(key->remote));
		__builtin_memcpy(tuple.ipv6.daddr, &key->local, sizeof(key->local));
		tuple.ipv6.sport = bpf_htons(key->remote_port);
		tuple.ipv6.dport = bpf_htons(key->local_port);
	} else {
		size = sizeof(tuple.ipv4);
		tuple.ipv4.saddr = addr_ipv4(&key->remote);
		tuple.ipv4.daddr = addr_ipv4(&key->local);
		tuple.ipv4.sport = bpf_htons(key->remote_port);
		tuple.ipv4.dport = bpf_htons(key->local_port);
	}
	if (key->protocol == IPPROTO_TCP) {
		sk = bpf_skc_lookup_tcp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
		if (!sk)
			return SOCKET_NONE;
		if (sk->state == BPF_TCP_LISTEN)
			found = SOCKET_LISTENING;
	} else {
		sk = bpf_sk_lookup_udp(skb, &tuple, size, BPF_F_CURRENT_NETNS, 0);
		if (!sk)
			return SOCKET_NONE;
		if (udp_socket_is_unconnected(sk))
			found = SOCKET_LISTENING;
	}
	bpf_sk_release(sk);
	return found;
}

/* Reports whether p is a reply to a connection that the host itself has opened. */
static __always_inline bool is_host_connection(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key;

	flow_received_key(&key, packet_tuple(p), FLOW_SNAT);
	return socket_lookup(skb, &key, p->ipv6) == SOCKET_CONNECTED;
}
