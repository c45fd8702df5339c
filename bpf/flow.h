/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Entries of flows, and their states. Packets of the container are trusted, because
 * anti-spoofing has checked them (spoof.h). Packets of a remote may be forged. Functions
 * named track find the packet's entry and update it; lookups only read.
 */
#pragma once

#include "flow_backup.h"
#include "fwd_cache.h"
#include "maps.h"
#include "masq_probes.h"
#include "parse.h"
#include "scratch.h"
#include "time.h"

/* Who has sent a packet of a flow. */
enum sender {
	FROM_CONTAINER, /* or the host, for its own flows */
	FROM_REMOTE,
};

/* Reports whether only containers open flows of this kind. */
static __always_inline bool flow_opened_by_container(const struct flow_key *key)
{
	return key->kind == FLOW_SNAT || key->kind == FLOW_EGRESS;
}

/* Reports whether the flow does not have its first candidate port. */
static __always_inline bool flow_is_moved(const struct flow_key *key, const struct flow *flow)
{
	return flow->probe || (key->kind == FLOW_DNAT && key->remote_port != flow->remote_port);
}

/* Sets the state of a flow that p opens. */
static __always_inline void flow_open(struct flow *flow, const struct packet *p, enum sender sender)
{
	flow->flags = 0;
	flow->last_seen = now_ticks();
	flow->created = flow->last_seen;
	flow->ack = 0;
	flow->expected = 0;
	flow->remote_end = 0;
	switch (p->protocol) {
	case IPPROTO_TCP:
		flow->state = FLOW_SYN_SENT;
		if (!p->tcp_syn)
			flow->flags = FLOW_PICKED_UP;
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
	       (flow_opened_by_container(key) || flow->flags & FLOW_PICKED_UP ||
		p->ack != flow->ack || packet_seq_end(p) != p->seq);
}

/* Updates the flow by the TCP packet p, which the container has sent. */
static __always_inline void flow_tcp_sent(struct flow *flow, const struct flow_key *key,
					  const struct packet *p)
{
	bool established;

	if (p->tcp_syn) {
		flow_open(flow, p, FROM_CONTAINER);
		return;
	}
	established = flow_handshake_done(flow, key, p);
	if (p->tcp_ack)
		flow->ack = p->ack;
	if (p->tcp_rst) {
		flow->state = FLOW_CLOSE;
		flow->flags |= FLOW_FIN;
		return;
	}
	if (p->tcp_synack) {
		if (!flow_opened_by_container(key)) {
			flow->state = FLOW_SYN_RECV;
			flow->flags = FLOW_REPLIED;
			flow->expected = p->seq + 1;
		}
		return;
	}
	flow->flags &= ~FLOW_RST_UNKNOWN;
	if (flow->state == FLOW_CLOSE && !(flow->flags & FLOW_FIN)) /* it has ignored the RST */
		flow->state = FLOW_ESTABLISHED;
	if (established)
		flow->state = FLOW_ESTABLISHED;
	if (flow->state == FLOW_SYN_SENT && !flow_opened_by_container(key)) {
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
	return p->end_expected;
}

/* Updates the flow by the TCP packet p, received under the remote's address. */
static __always_inline void flow_tcp_received(struct flow *flow, const struct flow_key *key,
					      const struct packet *p)
{
	bool opener = !flow_opened_by_container(key);

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
			flow_open(flow, p, FROM_REMOTE);
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
	    (p->end_expected || !(flow->flags & FLOW_FIN_UNACKED))) {
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

	if (reply)
		flow->flags |= FLOW_REPLIED;
	if (flow->state == FLOW_UDP && flow->flags & FLOW_REPLIED && age >= 2)
		flow->state = FLOW_UDP_STREAM;
}

/*
 * Updates the flow by its packet p. Writes only changes, so that CPUs can share the cache
 * line. Ignores ICMP errors and conntrack updates.
 */
static __noinline void flow_touch(const struct flow_key *key, struct flow *flow,
				  const struct packet *p, enum sender sender)
{
	bool opens = (sender == FROM_CONTAINER) == flow_opened_by_container(key);
	struct flow *new = flow_scratch_get();

	if (!new || p->icmp_error || p->ct_update)
		return;
	*new = *flow;
	if (flow_expired(flow)) {
		if (!opens) /* too late: prolongs nothing */
			return;
		flow_open(new, p, sender);
	}
	new->last_seen = now_ticks();
	if (p->protocol != IPPROTO_TCP)
		flow_datagram(new, !opens);
	else if (sender == FROM_CONTAINER)
		flow_tcp_sent(new, key, p);
	else
		flow_tcp_received(new, key, p);
	if (flow->ack != new->ack)
		flow->ack = new->ack;
	if (flow->remote_end != new->remote_end)
		flow->remote_end = new->remote_end;
	if (flow->state == new->state && flow->flags == new->flags &&
	    flow->last_seen == new->last_seen && flow->expected == new->expected)
		return;
	flow->state = new->state;
	flow->flags = new->flags;
	flow->last_seen = new->last_seen;
	flow->created = new->created;
	flow->expected = new->expected;
	if (flow_is_moved(key, new))
		masq_probes_record_flow(key, new, flow_is_assured(new));
	if (flow_is_assured(new))
		backup_store(key, new);
	else if (flow_ended(new))
		backup_remove(key);
}

/* The key for p, sent by a container. */
static __always_inline void flow_sent_key(struct flow_key *key, const struct packet *p,
					  enum flow_kind kind)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = p->dst;
	key->local = p->src;
	key->remote_port = p->dport;
	key->local_port = p->sport;
	key->protocol = p->protocol;
	key->kind = kind;
}

/* The key for p, sent by a remote. */
static __always_inline void flow_received_key(struct flow_key *key, const struct packet *p,
					      enum flow_kind kind)
{
	__builtin_memset(key, 0, sizeof(*key));
	key->remote = p->src;
	key->local = p->dst;
	key->remote_port = p->sport;
	key->local_port = p->dport;
	key->protocol = p->protocol;
	key->kind = kind;
}

/*
 * Finds and updates the flow of owner to which p, sent by a container, is a reply; or NULL. A
 * flow of a former container with the address has another owner.
 */
static __always_inline struct flow *flow_track_reply(const struct packet *p, __u64 owner)
{
	struct flow_key key;
	struct flow *flow;

	if (p->tcp_syn || p->sctp_init)
		return NULL;
	flow_sent_key(&key, p, FLOW_DNAT);
	flow = bpf_map_lookup_elem(&flows, &key);
	if (!flow || flow->owner != owner)
		return NULL;
	flow_touch(&key, flow, p, FROM_CONTAINER);
	return flow;
}

/* Restores the evicted entry of the flow to which p is a reply, or returns NULL. */
static __noinline struct flow *flow_recover_reply(const struct packet *p)
{
	struct flow_key key;

	if (p->tcp_syn)
		return NULL;
	flow_sent_key(&key, p, FLOW_DNAT);
	return flow_recover(&key);
}

/* Creates the entry of the flow to which p is a reply: the client used addr:port. */
static __noinline long flow_store_reply(const struct packet *p, const struct addr *addr, __u16 port,
					__u64 owner)
{
	struct flow_key key;
	struct flow flow = {
		.owner = owner,
		.nat_addr = *addr,
		.nat_port = port,
		.remote_port = p->dport,
	};

	flow_sent_key(&key, p, FLOW_DNAT);
	flow_open(&flow, p, FROM_CONTAINER);
	flow.flags |= FLOW_REPLIED;
	flow_remove(&key);
	return bpf_map_update_elem(&flows, &key, &flow, BPF_ANY);
}
