/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Policies: who may open connections to a container (ingress), and to whom a container may open them
 * (egress). README.md says where rules judge a packet. A container is known by its device, so neither a
 * forged source nor the host's masquerading changes who it is.
 */
#pragma once

#include "fwd_entry.h"
#include "parse_icmp.h"
#include "policy_flow.h"
#include "policy_pair.h"
#include "verdict.h"

/*
 * Drops the packet in pkt_scratch, which the rule set in policy_scratch does not admit; or reports it, and returns
 * true. refused: enum refused.
 */
__noinline int policy_refuse(struct __sk_buff *skb, __u32 reason, __u32 refused)
{
	const struct policy_args *args = policy_scratch_get();
	struct packet *p = pkt_scratch_get();

	if (!args || !p)
		return true;
	if (args->rule_set & RULE_SET_AUDIT) {
		drop_for(skb, args->owner, REASON_POLICY_AUDIT);
		return true;
	}
	p->decided.refused = refused;
	p->decided.judged_later = false;
	drop_for(skb, args->owner, reason);
	return false;
}

/*
 * Reports whether p is ARP or neighbor discovery of a host, not of a router, which a container must not pose
 * as. A router decrements the hop limit of 255 (RFC 4861, 6.1.1 and 7.1).
 */
static __always_inline bool policy_is_neighbor(struct __sk_buff *skb, const struct packet *p)
{
	__u8 *type;

	if (has_vlan(skb))
		return false;
	if (skb->protocol == bpf_htons(ETH_P_ARP))
		return true;
	if (!p->ipv6 || p->ttl != 255 || p->protocol != IPPROTO_ICMPV6 || packet_is_fragment(p))
		return false;
	type = bytes_at(skb, p->l4, sizeof(*type));
	return type && (*type == ICMP6_ROUTER_SOLICIT || *type == ICMP6_NEIGHBOR_SOLICIT ||
			*type == ICMP6_NEIGHBOR_ADVERT);
}

/* Reports whether p is for routers, hosts, or groups on the link: RFC 4861, RFC 3810. Not an echo. */
static __always_inline bool policy_is_link_icmpv6(struct __sk_buff *skb, const struct packet *p)
{
	__u8 *type;

	if (p->protocol != IPPROTO_ICMPV6 || packet_is_fragment(p) || p->dst.bytes[0] != 0xff ||
	    (p->dst.bytes[1] & 15) != 2)
		return false;
	type = bytes_at(skb, p->l4, sizeof(*type));
	return type && ((*type >= ICMP6_MLD_QUERY && *type <= ICMP6_NEIGHBOR_ADVERT) ||
			*type == ICMP6_MLD2_REPORT);
}

/*
 * Reports whether a container and its host need p on their link, also if they are closed to each other:
 * neighbor and group discovery, and DHCP.
 */
static __always_inline bool policy_is_link(struct __sk_buff *skb, const struct packet *p)
{
	if (policy_is_neighbor(skb, p))
		return true;
	if (p->ipv6)
		return policy_is_link_icmpv6(skb, p) ||
		       (p->protocol == IPPROTO_UDP && (p->dport == 546 || p->dport == 547));
	return p->protocol == IPPROTO_IGMP ||
	       (p->protocol == IPPROTO_UDP && (p->dport == 67 || p->dport == 68));
}

/* Reports whether the rule set admits everything from or to the container's own node. */
static __always_inline bool policy_admits_host(__u32 rule_set)
{
	return !rule_set || rule_set & RULE_SET_HOST;
}

/* Reports whether the rule set admits the connection of p with the peer in args. */
static __always_inline bool policy_judge(struct policy_args *args, const struct packet *p,
					 __u32 rule_set, __u16 port)
{
	args->rule_set = rule_set;
	args->protocol = p->protocol;
	args->port = port;
	return policy_verdict();
}

/* Reports whether the address is one of the container behind the device. */
static __always_inline bool policy_is_address_of(const struct device *device,
						 const struct addr *addr)
{
	struct endpoint *endpoint;

	if (addr_equal(addr, &device->addr4) || addr_equal(addr, &device->addr6))
		return true;
	endpoint = endpoint_lookup(addr);
	return endpoint && endpoint->container == device->container;
}

/*
 * Reports whether p, from the device ingress, cannot belong to a known flow: it has the source of another
 * container than the sender, or it is an ICMP error about a connection of others.
 */
static __always_inline bool policy_is_forged(const struct packet *p, __u32 ingress,
					     const struct device *sender)
{
	struct endpoint *endpoint;

	if (!ingress)
		return false;
	if (sender && p->icmp_error && !addr_equal(&p->outer_src, &p->src))
		return true;
	if (sender && policy_is_address_of(sender, &p->src))
		return false;
	endpoint = endpoint_lookup(&p->src);
	return endpoint && endpoint->ifindex != ingress;
}

/*
 * Sets the sender of p, from the device ingress, as the peer; false: it is the container itself. A client that the host's
 * rules masquerade, for example one of a node port, is not the host.
 */
static __always_inline bool policy_set_sender(struct __sk_buff *skb, struct policy_args *args,
					      const struct packet *p, __u32 ingress,
					      const struct device *sender)
{
	const struct addr *addr = p->icmp_error ? &p->outer_src : &p->src;
	const struct ct_translation *t;

	if (!ingress) {
		args->peer = *addr;
		args->host = true;
		return true;
	}
	if (!sender) {
		t = ct_source_changed(skb) ? ct_scratch_get() : NULL;
		return policy_set_peer(args, t ? &t->in.src : addr);
	}
	if (!policy_is_address_of(sender, addr))
		addr = p->ipv6 ? &sender->addr6 : &sender->addr4;
	policy_set_known(args, addr, PEER_NETWORK, sender->network);
	return sender->container != args->container;
}

/*
 * Reports whether the container behind the device receiver may receive p, which has come from the device
 * ingress (0: from the host), a container's if sender is not NULL. Its new address and port are the
 * receiver's. If not, drops p.
 */
static __always_inline bool policy_receives(struct __sk_buff *skb, struct packet *p,
					    const struct device *receiver, __u32 ingress,
					    const struct device *sender)
{
	struct policy_args *args = policy_scratch_get();
	struct flow_args *flow = flow_scratch_get();
	bool parsed = p->decided.parsed, admitted = false, forged;
	const __u32 *rule_sets; /* so no branch compares the whole word: Linux 6.18 warns */

	if (!args || !flow || !policy_load(args, receiver, p) || !args->rule_sets)
		return true;
	rule_sets = (const __u32 *)&args->rule_sets;
	if (!ingress && policy_admits_host(rule_sets[0]) && policy_admits_host(rule_sets[1]))
		return true;
	forged = policy_is_forged(p, ingress, sender);
	if (parsed) {
		policy_received_key(&flow->key, p);
		if (forged)
			flow_lookup(flow); /* for policy_track */
		else if (policy_is_known(FROM_REMOTE))
			return true;
		if (p->decided.revoked && !policy_refuse(skb, p->decided.revoked, REFUSED_RECEIVED))
			return false;
	}
	if (!policy_set_sender(skb, args, p, ingress, sender))
		return true;
	if (parsed && !(forged && p->icmp_error))
		admitted = policy_judge(args, p, RULE_SET_INGRESS(args->rule_sets),
					p->decided.new_port);
	args->rule_set = RULE_SET_INGRESS(args->rule_sets);
	if (args->rule_set && !admitted &&
	    !(ingress ? policy_is_neighbor(skb, p) : policy_is_link(skb, p)) &&
	    (p->decided.judged_later ||
	     !policy_refuse(skb, REASON_POLICY_INGRESS, REFUSED_RECEIVED)))
		return false;
	if (parsed)
		policy_track(FROM_REMOTE, sender ? sender->owner : args->owner);
	return true;
}

/*
 * Reports whether the flow of both containers admits the packet in pkt_scratch, which one sends to the other, behind the device
 * ifindex, unchanged, or the rules of both do. If not, each container's rules judge it separately. A reply may also be changed by
 * the stack.
 */
__noinline int policy_pair_admits(struct __sk_buff *skb, __u32 ifindex)
{
	struct policy_args *args = policy_scratch_get();
	struct flow_args *flows = flow_scratch_get();
	struct device *sender = device_lookup(skb->ifindex), *receiver = device_lookup(ifindex);
	struct packet *p = pkt_scratch_get();
	__u64 sent_sets, received_sets;
	__u32 generation;
	bool sent, known, forth;

	if (!args || !flows || !p || !sender || !receiver ||
	    !(sender->policy || receiver->policy) ||
	    (sender->flags | receiver->flags) & DEVICE_BRIDGED || !policy_load(args, receiver, p))
		return false;
	generation = args->generation;
	received_sets = args->rule_sets;
	if (!policy_load(args, sender, p))
		return false;
	sent_sets = args->rule_sets;
	sent = policy_pair_key(&flows->key, p);
	generation = sent ? args->generation * GOLDEN + generation
			  : generation * GOLDEN + args->generation;
	flows->new.owner = sender->owner ^ receiver->owner;
	flows->new.policy_generation = generation;
	if (policy_pair_access(flows, p, sent)) {
		p->decided.admitted = flows->flow.payer != sender->owner;
		return true;
	}
	known = !packet_opens(p) && flows->way < FLOW_WAYS && !flow_expired(&flows->flow) &&
		(flows->flow.owner ^ flows->flow.payer) == flows->new.owner;
	if (!known && !packet_may_open(p))
		return false;
	forth = !known || flows->flow.payer == sender->owner;

	policy_set_known(args, forth ? &p->dst : &p->src, PEER_NETWORK,
			 forth ? receiver->network : sender->network);
	if (!policy_judge(args, p, RULE_SET_EGRESS(forth ? sent_sets : received_sets),
			  forth ? p->dport : p->sport))
		return false;
	policy_set_known(args, forth ? &p->src : &p->dst, PEER_NETWORK,
			 forth ? sender->network : receiver->network);
	if (!policy_judge(args, p, RULE_SET_INGRESS(forth ? received_sets : sent_sets), args->port))
		return false;
	if (known) {
		flows->new = flows->flow;
	} else {
		__builtin_memset(&flows->new, 0, sizeof(flows->new));
		flows->new.owner = receiver->owner;
		flows->new.payer = sender->owner;
		flows->new.flags = sent ? 0 : FLOW_BY_REMOTE;
		flow_open(&flows->new, p, sent ? FROM_CONTAINER : FROM_REMOTE, now_ticks());
	}
	flows->new.policy_generation = generation;
	p->decided.admitted = !forth;
	return flow_insert();
}

/*
 * Finds out whether the rules of both containers admit p, which one sends to the other. If it takes the stack, that must not change
 * it.
 */
static __always_inline void policy_pair(struct __sk_buff *skb, struct packet *p,
					const struct device *sender, const struct endpoint *to)
{
	if (!(policy_checks() & POLICY_CHECK_ANY) || !p->fast_eligible || p->decided.ct_update ||
	    !is_tcp_or_udp(p->protocol) || to->container == sender->container ||
	    sender->route_set || !policy_pair_admits(skb, to->ifindex))
		return;
	p->decided.paired = true;
	p->decided.receiver = to->ifindex;
	p->decided.pending = PENDING_COMPARE;
}

/*
 * Reports whether the cached decision entry, or NULL, shows that p's policies admit its connection. False if p opens one.
 */
static __always_inline bool policy_entry_admits(const struct fwd_entry *entry,
						const struct packet *p)
{
	return entry && !packet_opens(p) && fwd_entry_bypasses(entry) &&
	       fwd_entry_is_current(entry) && entry->policies == p->decided.policies &&
	       entry->policy_generation == p->decided.policy_generation;
}

/*
 * The same for p, which the flow of decided.flow_kind translates. It tells who opened the connection, so only that side's rules
 * are asked, for each packet and without a FLOW_POLICY.
 */
static __always_inline bool policy_receives_translated(struct __sk_buff *skb, struct packet *p,
						       const struct device *receiver)
{
	struct policy_args *args = policy_scratch_get();
	bool by_remote = p->decided.flow_kind == FLOW_DNAT;

	if (!args || !policy_load(args, receiver, p) || policy_entry_admits(fwd_cache_find(p), p))
		return true;
	policy_set_known(args, &p->src, PEER_OUTSIDE, 0);
	if (policy_judge(args, p,
			 by_remote ? RULE_SET_INGRESS(args->rule_sets)
				   : RULE_SET_EGRESS(args->rule_sets),
			 by_remote ? p->decided.new_port : p->sport))
		return true;
	return policy_refuse(skb, by_remote ? REASON_POLICY_INGRESS : REASON_POLICY_EGRESS,
			     REFUSED_RECEIVED);
}

/*
 * The same for the packet in pkt_scratch, which an uplink has received. If it is admitted, its tag says so. A
 * FLOW_DNAT without translation does not tell who has opened the connection.
 */
__noinline int policy_receives_outside(struct __sk_buff *skb, __u32 ifindex)
{
	struct device *receiver = device_lookup(ifindex);
	struct packet *p = pkt_scratch_get();
	bool translated;

	if (!p || !receiver || !receiver->policy)
		return true;
	p->decided.parsed = true;
	translated = packet_is_translated(p);
	p->decided.judged_later = !translated;
	p->decided.admitted = translated ? policy_receives_translated(skb, p, receiver)
					 : policy_receives(skb, p, receiver, skb->ifindex, NULL);
	return p->decided.admitted;
}
