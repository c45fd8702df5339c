/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Policies of what containers send: in from_container, and where it enters another container or leaves the host. */
#pragma once

#include "fwd_stack.h"
#include "policy.h"
#include "route_cache.h"

/* Reports whether the entry has the tuple that a packet of the container in args, with the tag, had in from_container. */
static __always_inline bool policy_has_sent(const struct policy_args *args,
					    const struct routed *entry, const struct packet *p,
					    __u32 tag)
{
	const struct device *device;

	if (!entry || !tag_is_of(tag, entry->id) || entry->tuple.protocol != p->protocol)
		return false;
	device = device_lookup(entry->tuple.ifindex);
	return device && device->owner == args->owner;
}

/*
 * Creates the flow of a connection whose peer is known now, and which the rules admit: by the last hook, where p has the tag,
 * because the host may have translated p since from_container; or past the stack. If another packet has overwritten the entry,
 * the tag tells whether p has changed.
 */
static __always_inline void policy_track_pending(const struct policy_args *args, struct packet *p,
						 __u32 tag)
{
	__u32 key = tag % ROUTED_TUPLES;
	struct routed *entry = bpf_map_lookup_elem(&routed, &key);
	struct flow_args *flow = flow_scratch_get();
	const struct fwd_key *tuple = packet_tuple(p);

	if (!flow)
		return;
	if (p->decided.pending)
		p->decided.pending = PENDING_NOT;
	else if (policy_has_sent(args, entry, p, tag))
		tuple = &entry->tuple;
	else if (!tag_is_of(tag, p->id))
		return;
	flow_sent_key(&flow->key, tuple, FLOW_POLICY);
	flow_lookup(flow);
	policy_track(FROM_CONTAINER, args->owner);
}

/*
 * The same for the packet in pkt_scratch, which is sent to a host port, whose container is its new
 * destination: to_container does not get the tag.
 */
__noinline int policy_track_host_port(void)
{
	struct policy_args *args = policy_scratch_get();
	struct flow_args *flow = flow_scratch_get();
	struct packet *p = pkt_scratch_get();

	if (!args || !flow || !p || !policy_set_peer(args, &p->decided.new_addr) ||
	    !policy_judge(args, p, RULE_SET_EGRESS(args->rule_sets), p->decided.new_port))
		return 0; /* to_container drops p, unless the container is its own peer */
	p->decided.pending = PENDING_NOT;
	flow_sent_key(&flow->key, packet_tuple(p), FLOW_POLICY);
	flow_lookup(flow);
	policy_track(FROM_CONTAINER, args->owner);
	return 0;
}

/*
 * Reports whether from_uplink has found that the rules of the container behind receiver admit p, which has the tag. Only uplinks
 * are trusted to set it.
 */
static __always_inline bool policy_is_judged(struct __sk_buff *skb, const struct packet *p,
					     const struct device *receiver, __u32 tag)
{
	return p->decided.admitted && p->decided.parsed && tag_is_of(tag, p->id) &&
	       policy_is_address_of(receiver, &p->dst) && is_uplink(skb->ingress_ifindex);
}

/*
 * Reports whether p, which leaves for the outside with the tag, belongs to a connection that the rules in args admit and its
 * receiver has opened, by a host port or a flow that from_container has not looked up. Sets p->decided.revoked if they no longer
 * do.
 */
static __always_inline bool policy_is_reply(struct policy_args *args, struct packet *p, __u32 tag)
{
	struct flow_args *flows = flow_scratch_get();
	const struct flow *flow = &flows->flow;

	if (!flows || packet_opens(p))
		return false;
	flow_sent_key(&flows->key, packet_tuple(p), FLOW_DNAT);
	if (port_may_be_marked(PORT_REPLIES, p->protocol, p->sport) && flow_access(FLOW_READ) &&
	    flow->owner == args->owner && !flow_expired(flow) &&
	    (flow->nat_port != p->sport || !addr_equal(&flow->nat_addr, &p->src))) {
		if (policy_judge(args, p, RULE_SET_INGRESS(args->rule_sets), p->sport))
			return true;
		p->decided.revoked = REASON_POLICY_INGRESS;
		return false;
	}
	if (!tag_bypasses(tag))
		return false;
	flows->key.kind = FLOW_POLICY;
	p->decided.admitted = policy_is_known(FROM_CONTAINER);
	return p->decided.admitted;
}

/*
 * Tracks the connection of the packet in pkt_scratch, which leaves under the container's own address, so that no other flow admits
 * replies. from_container has sent it past the stack without asking the rules, or they admit it as it is.
 */
__noinline int policy_track_leaving(struct __sk_buff *skb)
{
	struct policy_args *args = policy_scratch_get();
	struct device *sender = device_lookup(skb->ingress_ifindex);
	struct flow_args *flow = flow_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct fwd_entry *entry;

	if (!args || !flow || !p || !sender || !sender->policy || p->decided.admitted ||
	    !policy_load(args, sender, p) || !args->rule_sets)
		return 0;
	flow_sent_key(&flow->key, packet_tuple(p), FLOW_POLICY);
	if (p->decided.as_sent ? policy_has_flow(args) : policy_is_known(FROM_CONTAINER))
		return 0;
	policy_set_peer(args, &p->dst);
	if (!policy_judge(args, p, RULE_SET_EGRESS(args->rule_sets), p->dport))
		return 0;
	policy_track(FROM_CONTAINER, args->owner);
	/* The next packet is decided in full, because rules have a flow of it now. */
	entry = fwd_cache_lookup_sent(skb, p);
	if (entry && !fwd_entry_bypasses(entry))
		entry->action = FWD_COUNT;
	return 0;
}

/* Reports whether the rules have let the container behind the device send a packet like p to the outside a moment ago. */
static __always_inline bool policy_has_left(struct __sk_buff *skb, struct packet *p,
					    const struct device *sender)
{
	struct policy_args *args = policy_scratch_get();

	return args && p->decided.parsed && policy_load(args, sender, p) &&
	       policy_entry_admits(fwd_cache_lookup_sent(skb, p), p);
}

/*
 * Reports whether the packet in pkt_scratch, with the tag, is unchanged since from_container found that all rules admit it, and
 * goes to the receiver that they were asked about. The id has more bits than the tag, so nobody finds a tuple that passes for
 * another one, while a second CPU writes the entry.
 */
static __always_inline bool policy_is_as_sent(struct __sk_buff *skb, const struct packet *p,
					      __u32 tag, __u32 receiver)
{
	__u32 key = tag % ROUTED_TUPLES;
	const struct routed *entry = bpf_map_lookup_elem(&routed, &key);

	return entry && entry->id == p->id && entry->receiver == receiver &&
	       entry->tuple.ifindex == skb->ingress_ifindex &&
	       ct_tuple_equal(&entry->tuple, packet_tuple(p));
}

/*
 * Reports whether an ingress hook has found that the rules admit the packet in pkt_scratch, with the tag, so that its last hook need
 * not ask them: as it is; or its sender's do, whatever the stack makes of it; or its receiver's, if it comes from an uplink.
 * ifindex: the device of the container that receives it, or 0: it leaves for the outside.
 */
__noinline int policy_is_decided(struct __sk_buff *skb, __u32 tag, __u32 ifindex)
{
	struct packet *p = pkt_scratch_get();
	struct device *receiver;

	if (!p || !p->decided.parsed || !(tag & TAG_TUPLE))
		return false;
	if (tag & TAG_PENDING) {
		p->decided.as_sent = policy_is_as_sent(skb, p, tag, ifindex);
		return p->decided.as_sent;
	}
	if (!p->decided.admitted)
		return false;
	receiver = ifindex ? device_lookup(ifindex) : NULL;
	return receiver ? policy_is_judged(skb, p, receiver, tag)
			: !!device_lookup(skb->ingress_ifindex);
}

/*
 * Reports whether the container behind the device sender may send p to the one behind the device
 * receiver; NULL: to the outside. p has the tag. If not, drops p.
 */
static __noinline bool policy_leaves(struct __sk_buff *skb, struct packet *p,
				     const struct device *sender, const struct device *receiver,
				     __u32 tag)
{
	struct policy_args *args = policy_scratch_get();
	bool pending = p->decided.pending || tag & TAG_PENDING;
	bool parsed = p->decided.parsed, admitted;

	/* Loaded in any case: what is cached now depends on it. */
	if (!args || !policy_load(args, sender, p) || !args->rule_sets || p->decided.admitted ||
	    (!RULE_SET_EGRESS(args->rule_sets) && (!parsed || (receiver && !pending))))
		return true;
	if (tag_bypasses(tag)) {
		policy_set_known(args, &p->dst, PEER_OUTSIDE, 0);
	} else if (receiver) {
		if (receiver->container == args->container)
			return true;
		policy_set_known(args, &p->dst, PEER_NETWORK, receiver->network);
	} else if (!policy_set_peer(args, &p->dst)) {
		return true;
	}
	args->rule_set = RULE_SET_EGRESS(args->rule_sets);
	admitted = (parsed && policy_judge(args, p, args->rule_set, p->dport)) ||
		   policy_is_neighbor(skb, p);
	if ((!admitted || !RULE_SET_EGRESS(args->rule_sets)) && !receiver && parsed &&
	    policy_is_reply(args, p, tag))
		return true;
	if (!p->decided.revoked)
		args->rule_set = RULE_SET_EGRESS(args->rule_sets);
	if ((!admitted || p->decided.revoked) &&
	    !policy_refuse(skb, p->decided.revoked ?: REASON_POLICY_EGRESS, REFUSED_SENT))
		return false;
	if (pending && parsed)
		policy_track_pending(args, p, tag);
	return true;
}

/*
 * The same for the packet in pkt_scratch, if the stack does not know the sender's device: the packet comes from another plugin's
 * bridge, or the stack has split it again (packet_ingress). from_container has left the device in routed; without the tag, the
 * source address identifies it. An entry of other packets or of another container admits nothing.
 */
__noinline int policy_leaves_unseen(struct __sk_buff *skb, __u32 tag)
{
	__u32 key = tag % ROUTED_TUPLES, ingress = skb->ingress_ifindex;
	struct packet *p = pkt_scratch_get();
	struct device *sender = NULL;
	struct endpoint *endpoint;
	struct routed *entry;

	if (!p)
		return true;
	p->decided.changed = !tag_bypasses(tag) && !tag_is_of(tag, p->id);
	if (packet_ingress(skb, p) != INGRESS_UNKNOWN && is_guarded(ingress))
		return true;
	endpoint = endpoint_lookup(&p->src);
	if (tag & TAG_PENDING) {
		entry = bpf_map_lookup_elem(&routed, &key);
		if (entry && tag_is_of(tag, entry->id))
			sender = device_lookup(entry->tuple.ifindex);
		if (!sender || (endpoint && endpoint->container != sender->container)) {
			drop(skb, REASON_POLICY_EGRESS);
			return false;
		}
	} else {
		if (endpoint)
			sender = device_lookup(endpoint->ifindex);
		if (sender && ingress && !(sender->flags & DEVICE_BRIDGED))
			sender = NULL;
	}
	return !sender || !sender->policy ||
	       policy_leaves(skb, p, sender, device_lookup(skb->ifindex), tag);
}

/*
 * Reports whether the rules of both sides admit the packet in pkt_scratch, with the tag, from one device (0: the host)
 * to another one. If not, drops it.
 */
__noinline int policy_admits(struct __sk_buff *skb, __u32 from, __u32 to, __u32 tag)
{
	struct device *sender = from ? device_lookup(from) : NULL, *receiver = device_lookup(to);
	struct packet *p = pkt_scratch_get();

	if (!p)
		return true;
	if (sender && sender->policy && !policy_leaves(skb, p, sender, receiver, tag))
		return false;
	if (!receiver || !receiver->policy)
		return true;
	packet_translate(p, &p->dst, p->dport);
	return policy_receives(skb, p, receiver, from, sender);
}

/*
 * Reports whether the container in args may send p by exit. To the host, or past our programs, the rules must admit it. The last
 * hook judges all else.
 */
static __always_inline bool policy_sends_away(struct __sk_buff *skb, struct policy_args *args,
					      const struct device *device, const struct packet *p,
					      int parsed, __u32 exit)
{
	__u32 rule_set = RULE_SET_EGRESS(args->rule_sets);

	args->rule_set = rule_set;
	if (parsed == PARSED_NOT_IP || parsed == PARSED_TRUNCATED)
		return policy_is_link(skb, p);
	if (exit == EXIT_GUARDED &&
	    (parsed == PARSED || (!p->ipv6 && !(device->flags & DEVICE_BRIDGED))))
		return true; /* unparsed IPv6 may be split anew, without its source's device */
	if (exit == EXIT_HOST) {
		if (rule_set & RULE_SET_HOST || policy_is_link(skb, p))
			return true;
		args->host = true;
		args->peer = p->dst;
	} else if (!policy_set_peer(args, &p->dst)) {
		return true;
	}
	if (parsed != PARSED) /* a bridge passes neighbor discovery on to another container */
		return device->flags & DEVICE_BRIDGED && policy_is_neighbor(skb, p);
	return policy_judge(args, p, rule_set, p->dport);
}

/*
 * Reports whether p, which the container in args sends, belongs to a connection that its rules admit. A reply by a host port
 * to the outside needs no flow of theirs; hairpin clients are known by other addresses.
 */
static __always_inline bool policy_is_known_sent(struct policy_args *args, struct packet *p)
{
	struct flow_args *flow = flow_scratch_get();

	if (!flow)
		return false;
	if (!p->decided.to_host && port_may_be_marked(PORT_REPLIES, p->protocol, p->sport) &&
	    policy_set_peer(args, &p->dst) && args->kind == PEER_OUTSIDE &&
	    policy_is_reply(args, p, TAG_NONE))
		return true;
	flow_sent_key(&flow->key, packet_tuple(p), FLOW_POLICY);
	p->decided.known = !packet_opens(p) && policy_is_known(FROM_CONTAINER);
	return p->decided.known;
}

/*
 * Decides what the last hook does about the packet of the container in args, which sees the peer after the host's translation; it
 * also creates the flow, if replies need one. Where none of our programs sees the packet again, from_container creates it.
 */
static __always_inline void policy_await_last_hook(struct policy_args *args, struct packet *p,
						   const struct device *device, __u32 exit)
{
	struct flow_args *flow = flow_scratch_get();

	if (!flow)
		return;
	policy_set_peer(args, &p->dst);
	p->decided.pending = PENDING_JUDGE;
	if (!policy_judge(args, p, RULE_SET_EGRESS(args->rule_sets), p->dport))
		return;
	if (exit != EXIT_GUARDED || device->route_set || route_has_rules(p->ipv6)) {
		flow_lookup(flow);
		policy_track(FROM_CONTAINER, args->owner);
	} else if (args->kind == PEER_OUTSIDE) {
		p->decided.pending = PENDING_COMPARE;
	}
}

/*
 * Reports whether the container that has sent the packet in pkt_scratch may do so, as far as from_container can
 * tell. If not, drops it.
 */
__noinline int policy_sends(struct __sk_buff *skb, __u32 parsed)
{
	struct policy_args *args = policy_scratch_get();
	struct device *device = device_lookup(skb->ifindex);
	struct packet *p = pkt_scratch_get();
	__u32 exit = EXIT_OTHER;
	bool known;

	if (!args || !p || !device || !policy_load(args, device, p) || !args->rule_sets)
		return true;
	if (parsed == PARSED) {
		known = policy_is_known_sent(args, p);
		p->decided.admitted = known && !p->decided.pending;
		if (known)
			return true;
		if (p->decided.revoked && !policy_refuse(skb, p->decided.revoked, REFUSED_SENT))
			return false;
	}
	if (parsed != PARSED_NOT_IP && parsed != PARSED_TRUNCATED)
		exit = route_ask(skb, ROUTE_EXIT);
	if (RULE_SET_EGRESS(args->rule_sets) &&
	    !policy_sends_away(skb, args, device, p, parsed, exit) &&
	    !policy_refuse(skb, REASON_POLICY_EGRESS, REFUSED_SENT))
		return false;
	if (parsed == PARSED)
		policy_await_last_hook(args, p, device, exit);
	return true;
}
