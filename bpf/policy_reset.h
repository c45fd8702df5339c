/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Revoked TCP connections: each side gets a RST for the next segment that it sends, with the number that it has acknowledged (RFC
 * 5961). The flow of the container whose rules have refused the segment shows that they had admitted the connection, and records
 * which side has got its RST. A side gets another RST only if it has acknowledged more since: then the first was too old.
 *
 * The segment itself becomes the RST, so nobody can send more RSTs than segments. Where it goes:
 *  - to the container that has sent the segment, if the stack has not translated it. The address must be that of the
 *    device from which the segment has come, so nobody can have a RST sent to another container;
 *  - back by the uplink, if the segment is to be translated past the stack;
 *  - else into the stack as if the other side had sent it: only conntrack knows how to translate it.
 *    from_container admits it by the flow (policy_owes_reset).
 */
#pragma once

#include "bytes.h"
#include "checksum.h"
#include "masq_port.h"
#include "node.h"
#include "policy_flow.h"
#include "tuple_hint.h"
#include "verdict.h"

#define TCP_PLAIN_RST	   bpf_htons(0x5004) /* the flag alone, and no options */
#define IPV4_DONT_FRAGMENT 0x4000
#define IPDEFTTL	   64
#define RESETS_PER_TICK	   4000 /* for the connections of one container, at most 65535 */

/* Reports whether p may be answered: never a SYN or RST, and nothing whose headers are not plain. */
static __always_inline bool reset_may_answer(const struct packet *p)
{
	__u32 header = p->ipv6 ? sizeof(struct ipv6hdr) : sizeof(struct iphdr);

	return p->protocol == IPPROTO_TCP && p->tcp_ack && !p->tcp_rst && !p->tcp_synack &&
	       p->fast_eligible && !p->decided.ct_update && !p->decided.remapped &&
	       p->l4 == p->l3 + header;
}

/*
 * Returns the time and the number of RSTs for connections of the owner in this tick. It is in tuple_notes, where another id may
 * overwrite it.
 */
static __always_inline __u32 reset_count(__u64 owner, __u32 *id)
{
	__u32 tick = now_ticks() << 16, count;

	*id = hash_mix(hash_mix((__u32)config.secret[1], owner), owner >> 32) | 1;
	count = tuple_hint_read(*id, tick);
	return count >> 16 == tick >> 16 ? count : tick;
}

/* Records in the flow that a side gets a RST with the number. Reports whether it is due. */
static __always_inline bool reset_mark(struct flow *flow, enum refused refused, __u32 number)
{
	bool sent = refused == REFUSED_SENT;
	__u8 side = sent ? FLOW_RESET_LOCAL : FLOW_RESET_REMOTE;
	__u32 last = sent ? flow->ack : flow->expected;

	if (flow->reset & side && (__s32)(number - last) <= 0)
		return false;
	flow->reset |= side;
	if (sent)
		flow->ack = number;
	else
		flow->expected = number;
	if (flow->reset & FLOW_RESET_LOCAL && flow->reset & FLOW_RESET_REMOTE)
		flow->state = FLOW_CLOSE;
	return true;
}

/* The same for the flow that flow_access has found, unless another one has replaced it. */
static __always_inline bool reset_mark_found(struct flow_args *args, const struct packet *p)
{
	struct flow_bucket *bucket = flow_bucket_of(args);
	struct flow_entry *entry = flow_entry_at(args, args->way);
	enum refused refused = p->decided.refused;
	__u32 number = p->ack;
	bool due = false;

	if (!bucket || !entry)
		return false;
	bpf_spin_lock(&bucket->lock);
	if (flow_has_key(bucket, entry, args) && flow_is_same(&entry->flow, &args->flow))
		due = reset_mark(&entry->flow, refused, number);
	bpf_spin_unlock(&bucket->lock);
	return due;
}

/* Reports whether the container of the policy has the flow with the key in args. */
static __always_inline bool reset_has_flow(const struct policy_args *policy, struct flow_args *args)
{
	return flow_access(FLOW_READ) && args->flow.owner == policy->owner &&
	       !flow_expired(&args->flow);
}

/*
 * Reports whether the sender of the packet in pkt_scratch gets a RST: the container in policy_scratch, which refused it, has a
 * flow that its rules had admitted.
 */
__noinline int reset_is_due(struct __sk_buff *skb)
{
	struct policy_args *policy = policy_scratch_get();
	struct flow_args *args = flow_scratch_get();
	const struct ct_translation *ct = ct_scratch_get();
	struct masq_args *masq = masq_scratch_get();
	struct packet *p = pkt_scratch_get();
	bool host = !skb->ingress_ifindex;

	if (!ct || !masq || !policy || !args || !p)
		return false;
	if (p->decided.refused == REFUSED_SENT)
		flow_sent_key(&args->key, packet_tuple(p), FLOW_POLICY);
	else
		policy_received_key(&args->key, p);
	/* Judged as translated. */
	if (p->decided.ct_nat && p->decided.refused == REFUSED_RECEIVED) {
		args->key.remote = ct->out.src;
		args->key.remote_port = ct->out.sport;
	}
	if (reset_has_flow(policy, args)) {
		if (args->flow.policy_generation == policy->generation)
			return false;
	} else if (policy_find_older(policy, args) || policy_find_pair(policy, args)) {
		args->new.owner = policy->owner;
		args->new.nat_addr = args->key.remote;
		args->new.nat_port = args->key.remote_port;
		/* The rules do not admit it. */
		args->new.policy_generation = policy->generation - 1;
		args->new.reset = host ? FLOW_PEER_HOST : 0;
		reset_mark(&args->new, p->decided.refused, p->ack);
		return !flow_expired(&args->new) && flow_insert();
	} else {
		args->key.kind = FLOW_DNAT;
		if (p->decided.masqueraded)
			args->key = masq->key;
		else if (p->decided.flow_kind == FLOW_SNAT)
			flow_received_key(&args->key, packet_tuple(p), FLOW_SNAT);
		/* If assured, both sides have sent: the rules have admitted the container's packets. */
		if (!reset_has_flow(policy, args) || !flow_is_assured(&args->flow))
			return false;
	}
	return reset_mark_found(args, p);
}

static __always_inline long reset_write_ip(struct __sk_buff *skb, const struct packet *p)
{
	struct ipv6hdr ip6 = {};
	struct iphdr ip = {};

	if (p->ipv6) {
		ip6.version = 6;
		ip6.payload_len = bpf_htons(sizeof(struct tcphdr));
		ip6.nexthdr = IPPROTO_TCP;
		ip6.hop_limit = IPDEFTTL;
		__builtin_memcpy(&ip6.saddr, &p->dst, sizeof(p->dst));
		__builtin_memcpy(&ip6.daddr, &p->src, sizeof(p->src));
		return bpf_skb_store_bytes(skb, p->l3, &ip6, sizeof(ip6), 0);
	}
	ip.version = 4;
	ip.ihl = sizeof(ip) / 4;
	ip.tot_len = bpf_htons(sizeof(ip) + sizeof(struct tcphdr));
	ip.frag_off = bpf_htons(IPV4_DONT_FRAGMENT);
	ip.ttl = IPDEFTTL;
	ip.protocol = IPPROTO_TCP;
	ip.saddr = addr_ipv4(&p->dst);
	ip.daddr = addr_ipv4(&p->src);
	ip.check = csum_fold(bpf_csum_diff(NULL, 0, (__be32 *)&ip, sizeof(ip), 0));
	return bpf_skb_store_bytes(skb, p->l3, &ip, sizeof(ip), 0);
}

/*
 * Makes the packet in pkt_scratch the RST that answers it. If a device is to complete its checksum, the field has only the sum
 * of the pseudo header: bpf_l4_csum_replace knows. The field 0xffff stands for no bytes in both cases.
 */
__noinline int reset_write(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct tcphdr tcp = {};
	__u32 check;
	__s64 sum, pseudo;

	if (!p)
		return -EINVAL;
	tcp.source = bpf_htons(p->dport);
	tcp.dest = bpf_htons(p->sport);
	tcp.seq = bpf_htonl(p->ack);
	tcp.doff = sizeof(tcp) / 4;
	tcp.rst = 1;
	sum = bpf_csum_diff(NULL, 0, (__be32 *)&tcp, sizeof(tcp), 0);
	/* An IPv4 address is mapped, which adds 0xffff: nothing. */
	pseudo = bpf_csum_diff(NULL, 0, (__be32 *)&p->src, 2 * sizeof(struct addr),
			       bpf_htons(sizeof(tcp)) + bpf_htons(IPPROTO_TCP));
	tcp.check = 0xffff;
	check = p->l4 + offsetof(struct tcphdr, check);
	return bpf_skb_change_tail(skb, p->l4 + sizeof(tcp), 0) || reset_write_ip(skb, p) ||
	       bpf_skb_store_bytes(skb, p->l4, &tcp, sizeof(tcp), 0) ||
	       bpf_l4_csum_replace(skb, check, 0, pseudo, BPF_F_PSEUDO_HDR) ||
	       bpf_l4_csum_replace(skb, check, 0, sum, 0);
}

/*
 * Sets the MAC addresses of the RST for p, and its device. Returns how to redirect it there, or -1 if that is unknown.
 */
static __always_inline int reset_route(struct __sk_buff *skb, const struct packet *p, __u8 *macs,
				       __u32 *ifindex)
{
	struct endpoint *endpoint = endpoint_lookup(&p->src);
	bool direct;

	*ifindex = skb->ifindex;
	/* Back by the uplink, as its frame has come. */
	if (packet_is_translated(p) || (p->decided.ct_nat && !endpoint)) {
		if (!p->l3)
			return 0;
		if (node_is_tunnel(skb->ifindex))
			return -1;
		return bpf_skb_load_bytes(skb, ETH_ALEN, macs, ETH_ALEN) ||
				       bpf_skb_load_bytes(skb, 0, macs + ETH_ALEN, ETH_ALEN)
			       ? -1
			       : 0;
	}
	if (endpoint && skb->ingress_ifindex && endpoint->ifindex != skb->ingress_ifindex)
		return -1; /* forged, or behind a bridge */
	direct = endpoint && skb->ingress_ifindex && !p->decided.changed;
	if (!direct)
		endpoint = p->decided.refused == REFUSED_RECEIVED
				   ? endpoint_lookup(&p->decided.new_addr)
				   : NULL;
	if (!endpoint)
		return -1;
	*ifindex = endpoint->ifindex;
	__builtin_memcpy(macs, direct ? endpoint->mac : endpoint->host_mac, ETH_ALEN);
	__builtin_memcpy(macs + ETH_ALEN, direct ? endpoint->host_mac : endpoint->mac, ETH_ALEN);
	return direct ? 0 : BPF_F_INGRESS;
}

/* Sets the MAC addresses, unless p goes back by a device without Ethernet. To a container, it gets the header first. */
static __always_inline long reset_write_link(struct __sk_buff *skb, const struct packet *p,
					     const __u8 *macs, __u32 ifindex)
{
	__be16 protocol = skb->protocol;

	if (!p->l3 && ifindex == skb->ifindex)
		return 0;
	if (!p->l3 && (bpf_skb_change_head(skb, ETH_HLEN, 0) ||
		       bpf_skb_store_bytes(skb, 2 * ETH_ALEN, &protocol, sizeof(protocol), 0)))
		return -EINVAL;
	return bpf_skb_store_bytes(skb, 0, macs, 2 * ETH_ALEN, 0);
}

/* Answers the packet in pkt_scratch, which rules have refused, by a RST, if one is due. Else drops it. */
__noinline int policy_reset(struct __sk_buff *skb)
{
	struct policy_args *policy = policy_scratch_get();
	struct packet *p = pkt_scratch_get();
	__u8 macs[2 * ETH_ALEN] = {};
	__u32 ifindex, count, id;
	int flags;

	if (!p || !policy || !p->decided.refused || !reset_may_answer(p))
		return VERDICT_DROP;
	flags = reset_route(skb, p, macs, &ifindex);
	count = reset_count(policy->owner, &id);
	if (flags < 0 || (count & 0xffff) >= RESETS_PER_TICK || !reset_is_due(skb) ||
	    reset_write(skb) || reset_write_link(skb, p, macs, ifindex))
		return VERDICT_DROP;
	tuple_hint_write(id, count + 1);
	skb->tc_index = flags ? TAG_RESET : TAG_TRANSLATED;
	return bpf_redirect(ifindex, flags);
}

/* Reports whether the packet in pkt_scratch is the RST that policy_reset sends in the name of its container. */
__noinline int policy_owes_reset(struct __sk_buff *skb)
{
	struct device *device = device_lookup(skb->ifindex);
	struct flow_args *args = flow_scratch_get();
	struct packet *p = pkt_scratch_get();

	if (!device || !args || !p || p->protocol != IPPROTO_TCP || p->tcp_flags != TCP_PLAIN_RST ||
	    packet_seq_end(p) != p->seq)
		return false;
	flow_sent_key(&args->key, packet_tuple(p), FLOW_POLICY);
	return flow_access(FLOW_READ) && args->flow.owner == device->owner &&
	       args->flow.reset & FLOW_RESET_REMOTE && args->flow.expected == p->seq;
}
