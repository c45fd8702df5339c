//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The entry programs. Each is a list of steps, and passes every packet that is
 * not ours to the next program and the stack. README.md has the big picture.
 */
#include "bypass.h"
#include "ct_nat.h"
#include "endpoint.h"
#include "forward.h"
#include "frag_queue.h"
#include "fwd_cache.h"
#include "gateway.h"
#include "hairpin.h"
#include "host_flow.h"
#include "host_port_forward.h"
#include "masq_endpoint.h"
#include "node.h"
#include "parse.h"
#include "policy_reset.h"
#include "policy_send.h"
#include "spoof.h"
#include "stack_hooks.h"
#include "tunnel.h"
#include "untranslated.h"
#include "uplink_source.h"

/* Loopback, egress: from the host to itself, so every destination is an address of this host. */
SEC("tc")
int to_loopback(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct host_port *port;

	if (!p || tag_take(skb) == TAG_TRANSLATED || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT; /* translated: a reply to a client on this host */
	port = host_port_lookup(p);
	return port ? hairpin_to_endpoint(skb, p, port) : VERDICT_NEXT;
}

/*
 * Sets what applies to p, which the endpoint from sends, if it goes through the stack.
 * stack_cacheable: the connection's next packets may go the same way, because no flow or
 * route can change it.
 */
static __always_inline void classify_sent(struct __sk_buff *skb, struct packet *p,
					  const struct device *device, const struct endpoint *from,
					  const struct endpoint *to)
{
	p->decided.fast_path = FAST_PATH_NEVER;
	if (from)
		p->decided.fast_path = fast_path_now(
			skb,
			to ? fast_path_between(from->fast_path, to->fast_path) : from->fast_path,
			to ? to->ifindex : 0);
	p->decided.to_host = !to && port_may_be_ours(p, p->dport) && !route_ask(skb, ROUTE_AWAY);
	p->decided.stack_cacheable =
		device && from && !device->route_set && spoof_is_plain(p) && !p->decided.to_host;
}

/* Reports whether the packet goes to the outside: if it bypasses the stack, to_uplink judges it. */
static __always_inline bool is_judged_late(const struct device *device, const struct endpoint *from,
					   const struct endpoint *to)
{
	return from && !to && !device->route_set;
}

/* Host end of a veth, ingress: from a container. */
SEC("tc")
int from_container(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	__u32 tag = tag_take(skb);
	struct endpoint *from = NULL, *to = NULL;
	int reason, verdict = NOT_HANDLED, parsed;
	struct device *device;

	if (!p)
		return VERDICT_NEXT;
	parsed = parse_headers(skb, ETH_HLEN);
	p->decided.ct_update = tag == TAG_CT_UPDATE;
	p->decided.reset = tag == TAG_RESET;
	if (parsed == PARSED && !p->decided.ct_update && !p->decided.reset)
		verdict = fwd_cache_forward(skb);
	if (verdict != NOT_HANDLED)
		return verdict;

	p->decided.generation = generation_get();
	device = device_lookup(skb->ifindex);
	if (device) {
		reason = spoof_check(skb, p, parsed, device);
		if (reason != REASON_NONE)
			return drop_for(skb, device->owner, reason);
	}
	if (parsed == PARSED_FRAGMENT)
		parsed = parse_fragment(skb, p);
	/*
	 * Fragments for this host may be for a host port. For others, a later hook needs the
	 * ports.
	 */
	if (frag_queue_wants(p, parsed) && route_ask(skb, ROUTE_LOCAL))
		return frag_queue_ingress(skb, p, parsed);
	if (parsed == PARSED) {
		/* Not if the packet arrives on another device: behind a bridge, or with a forged source. */
		from = endpoint_lookup(&p->src);
		if (from && from->ifindex != skb->ifindex)
			from = NULL;
		to = endpoint_lookup(&p->dst);
		classify_sent(skb, p, device, from, to);
		if (p->decided.reset)
			p->decided.admitted = policy_owes_reset(skb);
		else if (device && from && to)
			policy_pair(skb, p, device, to);
	}
	if (device && device->policy && !p->decided.admitted && !p->decided.paired &&
	    !is_judged_late(device, from, to) && !policy_sends(skb, parsed))
		return policy_reset(skb);
	if (parsed != PARSED)
		return device ? gateway_unparsed(skb, p, device, parsed) : VERDICT_NEXT;
	verdict = device && device->route_set ? gateway_forward(skb, p, device) : VERDICT_NEXT;
	if (verdict != VERDICT_NEXT)
		return verdict;

	if (from && !bypass_is_early(p))
		verdict = to ? bypass_to_endpoint(skb, p, device, from, to)
			     : bypass_to_uplink(skb, p, device, from);
	else if (!from && to && to->route_set)
		verdict = gateway_deliver(skb, p, to);
	if (verdict == VERDICT_NEXT && p->decided.ct_nat)
		verdict = ct_nat_forward(skb, p);
	if (verdict == VERDICT_NEXT && device && device->policy && !p->decided.admitted &&
	    is_judged_late(device, from, to) && !policy_sends(skb, PARSED))
		return policy_reset(skb);
	if (verdict == VERDICT_NEXT && p->decided.to_host)
		verdict = hairpin_from_container(skb, p, device, endpoint_lookup(&p->src));
	if (verdict != VERDICT_NEXT)
		return verdict == VERDICT_DROP ? policy_reset(skb) : verdict;
	verdict = bypass_none(skb, p, &p->dst, p->dport);
	/* The last hook ends a conntrack update, which it would not know by another tag. */
	if ((p->decided.pending && !p->decided.ct_update) ||
	    (p->ipv6 && packet_is_fragment(p) && policy_checks() & POLICY_CHECK_ANY))
		fwd_tag_pending(skb, p, p->decided.pending, p->decided.receiver);
	return verdict;
}

/* Host end of a veth, egress: to a container, from the stack or redirected past it. */
SEC("tc")
int to_container(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct endpoint *from, *to;
	bool unchanged, judged = tag_is_judged(skb);
	__u32 tag = tag_take(skb), ingress;
	int parsed;

	if (!p)
		return VERDICT_NEXT;
	parsed = parse(skb, p, ETH_HLEN);
	if (parsed == PARSED && is_ct_update(skb, p, tag)) {
		offload_moved(skb, skb->ingress_ifindex);
		return end_uncounted();
	}
	p->decided.admitted = judged;
	p->decided.parsed = parsed == PARSED;
	ingress = packet_ingress(skb, p);
	if (policy_checks() & (ingress ? POLICY_CHECK_ANY : POLICY_CHECK_HOST) &&
	    !policy_is_decided(skb, tag, skb->ifindex) &&
	    (!policy_leaves_unseen(skb, tag) || !policy_admits(skb, ingress, skb->ifindex, tag)))
		return policy_reset(skb);
	if (p->decided.as_sent)
		tag &= ~TAG_PENDING;
	if (parsed != PARSED || tag == TAG_TRANSLATED)
		return VERDICT_NEXT;
	if (!ingress)
		return host_flow_sent(skb);
	tag = offload_tag_delivered(p, tag);
	unchanged = bypass_is_unchanged(skb, p, tag);
	if (tag & TAG_TUPLE && !(tag & (TAG_OBSERVE | TAG_PENDING))) {
		if (unchanged)
			tuple_hint_delivery(p, 0, false);
		else
			ct_nat_delivered(skb, p, tag, 0);
		/* A packet of the host needs a host flow, even if its tag matches by chance. */
		if (!port_may_be_ours(p, p->sport) || (unchanged && fwd_knows_tuple()) ||
		    endpoint_lookup(&p->src))
			return VERDICT_NEXT;
		return host_flow_sent(skb);
	}
	from = endpoint_lookup(&p->src);
	to = endpoint_lookup(&p->dst);
	if (tag & TAG_PENDING && to)
		forward_track_pending(skb, p, tag, to);
	if (unchanged)
		bypass_observe(skb, p, from, to);
	else if (tag & TAG_TUPLE)
		ct_nat_delivered(skb, p, tag, 0);
	else if (to && !from)
		ct_nat_learn(skb);
	if (from || (unchanged && fwd_knows_tuple()))
		return VERDICT_NEXT;
	return host_flow_sent(skb);
}

/* Uplink, ingress: from the outside. */
static __always_inline int uplink_ingress(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = pkt_scratch_get();
	struct endpoint *endpoint;
	bool host_port;
	__u32 tag = tag_take(skb), reentry;
	int parsed, verdict = NOT_HANDLED;

	if (!p)
		return VERDICT_NEXT;
	parsed = parse_headers(skb, l3);
	if (l3 && node_is_tunnel(skb->ifindex) && !node_admits(skb, parsed, tag))
		return drop(skb, REASON_NODE);
	if (skb->pkt_type > PACKET_MULTICAST) /* for another host, or sent by this one */
		return VERDICT_NEXT;
	p->decided.ct_update = tag == TAG_CT_UPDATE;
	if (l3 && parsed == PARSED && tag != TAG_REENTRY && !p->decided.ct_update)
		verdict = fwd_cache_forward(skb);
	if (verdict == NOT_HANDLED) {
		p->decided.generation = generation_get();
		verdict = uplink_refuse(skb, parsed);
	}
	if (verdict != NOT_HANDLED)
		return verdict;

	if (skb->pkt_type != PACKET_HOST)
		return VERDICT_NEXT;
	if (parsed == PARSED_FRAGMENT)
		parsed = parse_fragment(skb, p);
	reentry = tag == TAG_REENTRY ? skb->cb[0] ^ reentry_of(p, &p->dst, true) : ~0U;
	if (reentry <= 1) {
		p->decided.admitted = !reentry;
		endpoint = endpoint_lookup(&p->dst);
		p->decided.fast_path =
			endpoint ? fast_path_now(skb, endpoint->fast_path, 0) : FAST_PATH_NEVER;
		return bypass_none(skb, p, &p->dst, p->dport);
	}
	if (frag_queue_wants(p, parsed)) {
		skb->tc_index = TAG_ADMITTED;
		return frag_queue_ingress(skb, p, parsed);
	}
	if (parsed != PARSED)
		return VERDICT_NEXT;

	host_port = is_host_port_number(p->protocol, p->dport);
	endpoint = NULL;
	if (!host_port && !packet_opens(p) && !node_is_tunnel_port(p)) {
		/* No flow is masqueraded as a container. In a cluster, skip its lookup for their addresses. */
		endpoint = node_any() ? endpoint_lookup(&p->dst) : NULL;
		if (!endpoint)
			verdict = forward_masq_reply(skb, p);
	}
	if (verdict == NOT_HANDLED) {
		endpoint = endpoint ?: endpoint_lookup(&p->dst);
		if (endpoint)
			verdict = forward_to_endpoint(skb, p, endpoint);
		else if (host_port)
			verdict = host_port_forward(skb, p);
		else if (ct_nat_receives(skb, p))
			verdict = bypass_none(skb, p, &p->dst, p->dport);
		if (verdict == VERDICT_NEXT && p->decided.ct_nat)
			verdict = ct_nat_forward(skb, p);
	}
	if (verdict == VERDICT_DROP)
		return policy_reset(skb);
	return verdict == NOT_HANDLED ? VERDICT_NEXT : verdict;
}

SEC("tc")
int from_uplink(struct __sk_buff *skb)
{
	return uplink_ingress(skb, ETH_HLEN);
}

/* For devices without Ethernet. */
SEC("tc")
int from_uplink_l3(struct __sk_buff *skb)
{
	return uplink_ingress(skb, 0);
}

/*
 * Gives p, which the container of owner sends to the outside, the source of its connection's last packet, a moment ago on this
 * CPU. NOT_HANDLED: there was none, or the flow has changed.
 */
static __noinline int uplink_repeat(struct __sk_buff *skb, struct packet *p, __u64 owner)
{
	struct flow_args *args = flow_scratch_get();
	struct fwd_entry *entry;

	if (!args || packet_opens(p) || !fwd_cacheable(p))
		return NOT_HANDLED;
	entry = fwd_cache_lookup_sent(skb, p);
	if (!entry || !entry->nat || !fwd_entry_is_current(entry) ||
	    !fwd_track_sent(args, p, entry, owner))
		return NOT_HANDLED;
	if (p->decided.bypass) /* its entry is stored again */
		p->decided.flow_kind = args->key.kind;
	return forward_snat(skb, p, &entry->nat_addr, entry->nat_port);
}

/*
 * Translates the source of p, which the endpoint sends to the outside. NOT_HANDLED: it keeps
 * its source.
 */
static __always_inline int uplink_translate(struct __sk_buff *skb, struct packet *p,
					    struct endpoint *endpoint)
{
	int verdict = uplink_repeat(skb, p, endpoint->owner);
	struct host_port *port;
	struct node *node;
	struct flow *flow;
	bool to_node;

	if (verdict != NOT_HANDLED)
		return verdict;
	flow = flow_track_sent(p, endpoint->owner, false);
	if (flow)
		return forward_reply(skb, p, flow);
	node = node_any() ? node_lookup(&p->dst) : NULL;
	to_node = node || node_is_tunnel(p->ifindex);
	if (!to_node && !masq_skips(endpoint, p))
		return masq_endpoint(skb, p, endpoint);
	if (to_node && !host_port_reverse(&p->src, p->sport, p->protocol)) {
		if (node) /* without an entry the route decides, which may change */
			untranslated_record(skb, p);
		return NOT_HANDLED;
	}
	if (flow_track_direct_reply(endpoint->owner))
		return NOT_HANDLED;
	port = host_port_lookup_reply(p);
	return port ? host_port_reply(skb, p, port) : NOT_HANDLED;
}

/*
 * Reports whether the rules of the container that has sent the packet in pkt_scratch admit that it leaves. If
 * not, drops it.
 */
__noinline int uplink_admits(struct __sk_buff *skb, __u32 tag)
{
	struct device *sender = device_lookup(skb->ingress_ifindex);
	struct packet *p = pkt_scratch_get();

	return !p || !sender || !sender->policy || policy_has_left(skb, p, sender) ||
	       policy_leaves(skb, p, sender, NULL, tag);
}

/* The same as policy_reset, which learns of the flow by which the container has been masqueraded. */
__noinline int uplink_reset(struct __sk_buff *skb)
{
	struct policy_args *policy = policy_scratch_get();
	struct masq_args *args = masq_scratch_get();
	struct packet *p = pkt_scratch_get();
	struct addr none = {};

	if (p && args && policy && p->decided.refused && p->tcp_ack) {
		masq_init(args, packet_tuple(p), &none, policy->owner, 0);
		args->read_only = true;
		args->has_former = true;
		p->decided.masqueraded = masq_find_former(skb);
	}
	return policy_reset(skb);
}

/* Records for the connection's next packets that p, with the tag of its ingress hook, leaves with its new source. */
static __always_inline void uplink_record(struct __sk_buff *skb, struct packet *p, __u32 tag)
{
	if (p->decided.bypass)
		fwd_cache_store_egress(skb);
	else if (tag & TAG_TUPLE && !bypass_is_unchanged(skb, p, tag))
		ct_nat_delivered(skb, p, tag, fib_hop_of_frame(skb));
}

/* Records in p how from_container has sent it, as its tag says. */
static __always_inline void uplink_set_bypass(struct packet *p, __u32 tag)
{
	p->decided.bypass = tag_bypasses(tag);
	p->decided.uncached = (tag & ~(__u32)TAG_OBSERVE) == TAG_BYPASS_ONCE;
	p->decided.offloaded = tag & TAG_OBSERVE;
}

/* Handles p, which leaves under no container's address. The host's rules may have changed a container's packet. */
static __always_inline int uplink_sent(struct __sk_buff *skb, struct packet *p, __u32 tag)
{
	int verdict;

	packet_translate(p, &p->src, p->sport);
	uplink_set_bypass(p, tag);
	verdict = host_flow_sent(skb);
	if (verdict != VERDICT_NEXT || p->decided.new_port != p->sport)
		return verdict;
	if (p->decided.as_sent)
		policy_track_leaving(skb);
	uplink_record(skb, p, tag);
	return VERDICT_NEXT;
}

/* Uplink, egress: to the outside. */
static __always_inline int uplink_egress(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = pkt_scratch_get();
	struct endpoint *endpoint;
	bool judged = tag_is_judged(skb);
	__u32 tag = tag_take(skb);
	int parsed, verdict;

	/* Our ingress hooks take away the tags that others set. veth keeps them. */
	if (!p || (tag == TAG_TRANSLATED && is_guarded(skb->ingress_ifindex)))
		return VERDICT_NEXT;
	parsed = parse(skb, p, l3);
	if (parsed == PARSED && is_ct_update(skb, p, tag)) {
		if (l3 && is_guarded(skb->ingress_ifindex))
			offload_moved(skb, skb->ifindex);
		return end_uncounted();
	}
	p->decided.admitted = judged;
	p->decided.parsed = parsed == PARSED;
	p->decided.generation = generation_get();
	if (packet_ingress(skb, p) && policy_checks() & POLICY_CHECK_ANY &&
	    !policy_is_decided(skb, tag, 0) &&
	    (!policy_leaves_unseen(skb, tag) || !uplink_admits(skb, tag)))
		return uplink_reset(skb);
	if (parsed == PARSED_NOT_IP)
		return VERDICT_NEXT;
	if (l3 && parsed == PARSED && node_any() && untranslated_lately(skb, p, tag))
		return VERDICT_NEXT;
	endpoint = endpoint_lookup(&p->src);
	if (!endpoint) {
		if (tunnel_is_forged(skb, p, parsed))
			return drop(skb, REASON_TUNNEL);
		return parsed == PARSED ? uplink_sent(skb, p, tag) : VERDICT_NEXT;
	}
	if (p->decided.flush_queue)
		return frag_queue_flush(skb, p, 0);
	if (parsed != PARSED)
		return masq_unparsed(skb, p, endpoint, parsed);
	/* A container may report errors about its own packets only, the host about any. */
	if (p->icmp_error && skb->ingress_ifindex && !addr_equal(&p->outer_src, &p->src))
		return drop_for(skb, endpoint->owner, REASON_ICMP_ERROR);
	uplink_set_bypass(p, tag);
	if (l3)
		bypass_forwarded(skb, p, tag, endpoint);

	verdict = uplink_translate(skb, p, endpoint);
	if (verdict != NOT_HANDLED)
		return verdict;
	packet_translate(p, &p->src, p->sport);
	if ((p->decided.bypass && policy_checks() & POLICY_CHECK_ANY) || p->decided.as_sent)
		policy_track_leaving(skb);
	uplink_record(skb, p, tag);
	return VERDICT_NEXT;
}

SEC("tc")
int to_uplink(struct __sk_buff *skb)
{
	int verdict = uplink_egress(skb, ETH_HLEN);

	if (verdict == VERDICT_NEXT && node_is_tunnel(skb->ifindex))
		skb->tc_index = TAG_TRANSLATED; /* for the uplink that sends the tunnel's packet */
	return verdict;
}

/* For devices without Ethernet. */
SEC("tc")
int to_uplink_l3(struct __sk_buff *skb)
{
	return uplink_egress(skb, 0);
}

/*
 * Attached nowhere. Returns what makes fastPath auto act as established at skb's device, for its
 * family: enum stack_hook. A process that reads the state runs it.
 */
SEC("tc")
int stack_hooks(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();

	if (!p)
		return HOOK_UNKNOWN;
	p->ipv6 = skb->protocol == bpf_htons(ETH_P_IPV6);
	p->now = 0;
	return stack_hooks_of(skb, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
