/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The key and the state of a flow, and how its packets change it. Packets of the container are trusted,
 * because anti-spoofing has checked them (spoof.h). Packets of a remote may be forged.
 */
#pragma once

#include "packet.h"

/* The key for packets with the tuple, sent by a container. */
static __always_inline void flow_sent_key(struct flow_key *key, const struct fwd_key *tuple,
					  enum flow_kind kind)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = tuple->dst;
	key->local = tuple->src;
	key->remote_port = tuple->dport;
	key->local_port = tuple->sport;
	key->protocol = tuple->protocol;
	key->kind = kind;
}

/* The same, sent by a remote. */
static __always_inline void flow_received_key(struct flow_key *key, const struct fwd_key *tuple,
					      enum flow_kind kind)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = tuple->src;
	key->local = tuple->dst;
	key->remote_port = tuple->sport;
	key->local_port = tuple->dport;
	key->protocol = tuple->protocol;
	key->kind = kind;
}

/* Reports whether addr:port is side 0 of a FLOW_OFFLOAD: the one with the lower port, or if equal, address. */
static __always_inline bool offload_is_first(const struct addr *addr, __u16 port,
					     const struct addr *other, __u16 other_port)
{
	return port != other_port ? port < other_port : addr_less(addr, other);
}

/*
 * Sets key to that of the connection of packets with the tuple, addressed to addr:port. Returns which side
 * has sent them.
 */
static __noinline __u8 offload_key(struct flow_key *key, const struct fwd_key *tuple,
				   const struct addr *addr, __u16 port)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->protocol = tuple->protocol;
	key->kind = FLOW_OFFLOAD;
	if (offload_is_first(&tuple->src, tuple->sport, addr, port)) {
		key->remote = tuple->src;
		key->remote_port = tuple->sport;
		key->local = *addr;
		key->local_port = port;
		return 0;
	}
	key->remote = *addr;
	key->remote_port = port;
	key->local = tuple->src;
	key->local_port = tuple->sport;
	return 1;
}

/* Who has sent a packet of a flow. */
enum sender {
	FROM_CONTAINER, /* or the host, for its own flows */
	FROM_REMOTE,
};

/* Reports whether the container has opened the flow. */
static __always_inline bool flow_opened_by_container(const struct flow_key *key,
						     const struct flow *flow)
{
	return key->kind == FLOW_SNAT || ((key->kind == FLOW_POLICY || key->kind == FLOW_PAIR) &&
					  !(flow->flags & FLOW_BY_REMOTE));
}

/* Reports whether the flow has been idle for too long at the time, in ticks. */
static __always_inline bool flow_expired_at(const struct flow *flow, __u32 now)
{
	__u32 idle = now - flow->last_seen, state = flow->state;

	if ((__s32)idle < 0) /* another CPU is a tick ahead */
		return false;
	asm volatile("" : "+r"(state));
	return state >= FLOW_STATES || idle > config.timeout[state];
}

static __always_inline bool flow_expired(const struct flow *flow)
{
	return flow_expired_at(flow, now_ticks());
}

/* Reports whether the flow must not be lost: its sides may be silent for long, and continue then. */
static __always_inline bool flow_is_assured(const struct flow *flow)
{
	return (flow->state >= FLOW_ESTABLISHED && flow->state <= FLOW_CLOSE_WAIT) ||
	       flow->state == FLOW_UDP_STREAM;
}

/* Reports whether both sides have ended the connection. */
static __always_inline bool flow_ended(const struct flow *flow)
{
	return flow->state >= FLOW_LAST_ACK && flow->state <= FLOW_CLOSE;
}

/* Reports whether both sides have sent, and the flow has neither ended nor expired. */
static __always_inline bool flow_is_live(const struct flow *flow)
{
	return flow->flags & FLOW_REPLIED && !flow_expired(flow) && !flow_ended(flow);
}

/* Sets the state of a flow that p opens. */
static __always_inline void flow_open(struct flow *flow, const struct packet *p, enum sender sender,
				      __u32 now)
{
	flow->flags &= FLOW_BY_REMOTE;
	flow->last_seen = now;
	flow->created = now;
	flow->ack = 0;
	flow->expected = 0;
	flow->remote_end = 0;
	switch (p->protocol) {
	case IPPROTO_TCP:
		flow->state = FLOW_SYN_SENT;
		if (!p->tcp_syn)
			flow->flags |= FLOW_PICKED_UP;
		if (sender == FROM_CONTAINER) {
			flow->ack = p->ack;
			flow->expected = p->seq + 1; /* by SYN+ACK */
		}
		break;
	case IPPROTO_UDP:
		flow->state = FLOW_UDP;
		break;
	default:
		flow->state = packet_is_icmp(p) ? FLOW_ICMP : FLOW_OTHER;
	}
}

/* The next state after a FIN, or after its ACK. */
static __always_inline __u8 flow_closing_state(const struct flow *flow, const struct packet *p)
{
	bool fin = flow->flags & FLOW_FIN, remote_fin = flow->flags & FLOW_REMOTE_FIN;

	if (flow->state < FLOW_ESTABLISHED || flow->state >= FLOW_TIME_WAIT)
		return flow->state;
	if (fin && remote_fin) /* the side that closes last waits for the ACK of its FIN */
		return p->tcp_fin ? FLOW_LAST_ACK : FLOW_TIME_WAIT;
	if (fin)
		return FLOW_FIN_WAIT;
	return remote_fin ? FLOW_CLOSE_WAIT : flow->state;
}

/*
 * Reports whether the container's p shows that the handshake is complete. Before, the
 * container sends a client only repetitions of an ACK, for packets out of the window.
 */
static __always_inline bool flow_handshake_done(const struct flow *flow, const struct flow_key *key,
						const struct packet *p)
{
	return flow->state == FLOW_SYN_RECV &&
	       (flow_opened_by_container(key, flow) || flow->flags & FLOW_PICKED_UP ||
		p->ack != flow->ack || packet_seq_end(p) != p->seq);
}

/*
 * Reports whether the container's RST ends the connection. During the handshake, it may also answer a
 * packet of an earlier connection on the same ports (RFC 9293, 3.10.7.3), and the handshake goes on.
 * The RST of a refused SYN has the number 0, and so has expected then.
 */
static __always_inline bool flow_rst_ends(const struct flow *flow, const struct packet *p)
{
	return flow->state >= FLOW_ESTABLISHED || flow->flags & FLOW_PICKED_UP ||
	       p->seq == flow->expected;
}

/* Updates the flow by the TCP packet p, which the container has sent. */
static __always_inline void flow_tcp_sent(struct flow *flow, const struct flow_key *key,
					  const struct packet *p, __u32 now)
{
	bool established;

	if (p->tcp_syn) {
		flow_open(flow, p, FROM_CONTAINER, now);
		return;
	}
	if (p->tcp_rst) {
		if (flow_rst_ends(flow, p)) {
			flow->state = FLOW_CLOSE;
			flow->flags |= FLOW_FIN;
		}
		return;
	}
	established = flow_handshake_done(flow, key, p);
	if (p->tcp_ack)
		flow->ack = p->ack;
	if (p->tcp_synack) {
		if (!flow_opened_by_container(key, flow)) {
			flow->state = FLOW_SYN_RECV;
			flow->flags = (flow->flags & FLOW_BY_REMOTE) | FLOW_REPLIED;
			flow->expected = p->seq + 1;
		}
		return;
	}
	flow->flags &= ~FLOW_RST_UNKNOWN;
	if (flow->state == FLOW_CLOSE && !(flow->flags & FLOW_FIN)) /* it has ignored the RST */
		flow->state = FLOW_ESTABLISHED;
	if (established)
		flow->state = FLOW_ESTABLISHED;
	if (flow->state == FLOW_SYN_SENT && !flow_opened_by_container(key, flow)) {
		flow->state = FLOW_SYN_RECV; /* of a connection without its SYN */
		flow->flags |= FLOW_REPLIED;
	}
	if (flow->flags & FLOW_FIN_UNACKED && p->tcp_ack && p->ack == flow->expected) {
		flow->flags &= ~FLOW_FIN_UNACKED;
		flow->flags |= FLOW_REMOTE_FIN;
	}
	if (p->tcp_fin)
		flow->flags |= FLOW_FIN;
	flow->state = flow_closing_state(flow, p);
}

/* Reports whether the remote's RST refuses the SYN (RFC 9293, 3.10.7.3) or ends the connection. */
static __always_inline bool flow_is_reset(const struct flow *flow, const struct packet *p)
{
	if (flow->state == FLOW_SYN_SENT)
		return p->tcp_ack && p->ack == flow->expected;
	return p->decided.end_expected;
}

/* Updates the flow by the TCP packet p, received under the remote's address. */
static __always_inline void flow_tcp_received(struct flow *flow, const struct flow_key *key,
					      const struct packet *p, __u32 now)
{
	bool opener = !flow_opened_by_container(key, flow);

	if (p->tcp_rst) {
		if (flow_is_reset(flow, p))
			flow->state = FLOW_CLOSE;
		else
			flow->flags |= FLOW_RST_UNKNOWN;
		return;
	}
	flow->remote_end = packet_seq_end(p);
	if (p->tcp_syn) {
		if (opener && (flow_ended(flow) || !(flow->flags & FLOW_REPLIED)))
			flow_open(flow, p, FROM_REMOTE, now);
		return;
	}
	if (p->tcp_synack) {
		if (!opener && flow->state == FLOW_SYN_SENT && p->ack == flow->expected) {
			flow->state = FLOW_SYN_RECV;
			flow->flags |= FLOW_REPLIED;
		}
		return;
	}
	if (!opener && flow->state == FLOW_SYN_SENT && flow->flags & FLOW_PICKED_UP) {
		flow->state = FLOW_SYN_RECV;
		flow->flags |= FLOW_REPLIED;
	}
	if (opener && flow->state == FLOW_SYN_RECV &&
	    (flow->flags & FLOW_PICKED_UP || (p->tcp_ack && p->ack == flow->expected)))
		flow->state = FLOW_ESTABLISHED;
	if (p->tcp_fin && flow->state >= FLOW_ESTABLISHED && !(flow->flags & FLOW_REMOTE_FIN) &&
	    (p->decided.end_expected || !(flow->flags & FLOW_FIN_UNACKED))) {
		flow->flags |= FLOW_FIN_UNACKED;
		flow->expected = packet_seq_end(p);
	}
	if (flow->state == FLOW_LAST_ACK)
		flow->state = FLOW_TIME_WAIT;
}

/* Updates the flow by a packet of UDP, ICMP, or a protocol without ports. */
static __always_inline void flow_datagram(struct flow *flow, bool reply)
{
	__u16 age = flow->last_seen - flow->created;

	if (flow->state == FLOW_UDP && (!reply || flow->flags & FLOW_REPLIED))
		flow->flags |= FLOW_CONTINUES;
	if (reply)
		flow->flags |= FLOW_REPLIED;
	if (flow->state == FLOW_UDP && flow->flags & FLOW_REPLIED && age >= 2)
		flow->state = FLOW_UDP_STREAM;
}

/*
 * Updates the flow by its packet p, and not by ICMP errors and conntrack updates. Runs under the
 * lock of a bucket, so it calls no function.
 */
static __always_inline void flow_update(struct flow *flow, const struct flow_key *key,
					const struct packet *p, enum sender sender, __u32 now)
{
	bool opens = (sender == FROM_CONTAINER) == flow_opened_by_container(key, flow);

	if (flow_expired_at(flow, now)) {
		if (!opens) /* too late: prolongs nothing */
			return;
		flow_open(flow, p, sender, now);
	}
	flow->last_seen = now;
	if (p->protocol != IPPROTO_TCP)
		flow_datagram(flow, !opens);
	else if (sender == FROM_CONTAINER)
		flow_tcp_sent(flow, key, p, now);
	else
		flow_tcp_received(flow, key, p, now);
}
