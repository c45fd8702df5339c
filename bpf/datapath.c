//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The entry programs. Each is a list of steps, and passes every packet that is
 * not ours to the next program and the stack. README.md has the big picture.
 */
#include "bypass.h"
#include "endpoint.h"
#include "forward.h"
#include "frag_queue.h"
#include "fwd_cache.h"
#include "hairpin.h"
#include "host_port_forward.h"
#include "masq_endpoint.h"
#include "masq_host.h"
#include "policy.h"
#include "scratch.h"
#include "spoof.h"

/* Loopback, egress: from the host to itself, so every destination is an address of this host. */
SEC("tc")
int to_loopback(struct __sk_buff *skb)
{
	struct packet *p = pkt_scratch_get();
	struct host_port *port;

	if (!p || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT;
	port = host_port_lookup(p);
	return port ? hairpin_to_endpoint(skb, p, port) : VERDICT_NEXT;
}

/* Host end of a veth, ingress: from a container. */
SEC("tc")
int from_container(struct __sk_buff *skb)
{
	struct device *device = device_lookup(skb->ifindex);
	struct packet *p = pkt_scratch_get();
	bool ct_update = skb->tc_index == TAG_CT_UPDATE;
	struct endpoint *sender, *from, *to;
	int reason, verdict;

	skb->tc_index = TAG_NONE;
	if (device) {
		reason = spoof_check(skb, device);
		if (reason != REASON_NONE)
			return drop_for(skb, device->owner, reason);
	}
	if (!p || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT;
	if (device && device->ingress_policy != POLICY_OPEN)
		policy_track_egress(p, device);
	verdict = ct_update ? VERDICT_NEXT : fwd_cache_forward(skb, p);
	if (verdict != VERDICT_NEXT)
		return verdict;

	sender = endpoint_lookup(&p->src);
	to = endpoint_lookup(&p->dst);
	/* NULL if this is not the endpoint's own device: it sits behind a bridge, or is spoofed. */
	from = sender && sender->ifindex == skb->ifindex ? sender : NULL;
	if (to)
		return from ? bypass_to_endpoint(skb, p, from, to) : VERDICT_NEXT;
	verdict = from ? bypass_to_uplink(skb, p, from) : VERDICT_NEXT;
	if (verdict != VERDICT_NEXT)
		return verdict;
	return hairpin_from_container(skb, p, device, sender);
}

/* Host end of a veth, egress: to a container, from the stack or redirected past it. */
SEC("tc")
int to_container(struct __sk_buff *skb)
{
	struct device *device;
	struct packet *p;
	int parsed;

	if (!skb->ingress_ifindex) /* from the host itself */
		return VERDICT_NEXT;
	p = pkt_scratch_get();
	if (!p)
		return VERDICT_NEXT;
	parsed = parse(skb, p, ETH_HLEN);
	device = device_lookup(skb->ifindex);
	if (device && !policy_allows(skb, p, device) &&
	    (parsed != PARSED || !policy_track_reply(p, device)))
		return drop_for(skb, device->owner, REASON_POLICY);
	return parsed == PARSED ? bypass_observe(skb, p) : VERDICT_NEXT;
}

/* Uplink, ingress: from the outside. */
static __always_inline int uplink_ingress(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = pkt_scratch_get();
	struct endpoint *endpoint;
	struct flow *flow;
	int parsed, verdict;

	if (!p || skb->pkt_type != PACKET_HOST)
		return VERDICT_NEXT;
	parsed = parse(skb, p, l3);
	if (parsed == PARSED_FRAGMENT)
		return frag_queue_add(skb, p) ? VERDICT_DROP : VERDICT_NEXT;
	if (p->flush_queue)
		return frag_queue_flush(skb, p, BPF_F_INGRESS);
	if (parsed != PARSED)
		return VERDICT_NEXT;
	verdict = l3 && skb->tc_index != TAG_CT_UPDATE ? fwd_cache_forward(skb, p) : VERDICT_NEXT;
	if (verdict != VERDICT_NEXT)
		return verdict;

	flow = masq_track_reply(p);
	endpoint = flow ? endpoint_lookup(&flow->nat_addr) : NULL;
	if (flow && flow->owner == (endpoint ? endpoint->owner : OWNER_HOST))
		return forward_dnat(skb, p, endpoint, &flow->nat_addr, flow->nat_port);
	endpoint = endpoint_lookup(&p->dst);
	if (endpoint)
		return forward_to_endpoint(skb, p, endpoint);
	return host_port_forward(skb, p);
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

/* Uplink, egress: to the outside. */
static __always_inline int uplink_egress(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = pkt_scratch_get();
	struct endpoint *endpoint;
	struct flow *flow;
	struct host_port *port;
	__u32 tag = skb->tc_index;
	int parsed;

	if (tag == TAG_BYPASS || tag == TAG_TRANSLATED)
		skb->tc_index = TAG_NONE;
	if (!p || tag == TAG_TRANSLATED)
		return VERDICT_NEXT;
	parsed = parse(skb, p, l3);
	if (parsed == PARSED_NOT_IP)
		return VERDICT_NEXT;
	endpoint = endpoint_lookup(&p->src);
	if (!endpoint)
		return parsed == PARSED ? masq_host(skb, p) : VERDICT_NEXT;
	if (p->flush_queue)
		return frag_queue_flush(skb, p, 0);
	if (parsed != PARSED)
		return masq_unparsed(skb, p, endpoint, parsed);
	p->bypass = tag == TAG_BYPASS;
	if (l3 && !p->bypass && bypass_observe(skb, p) == VERDICT_DROP)
		return VERDICT_DROP;

	flow = flow_track_reply(p);
	if (flow && flow->owner == endpoint->owner)
		return forward_snat(skb, p, &flow->nat_addr, flow->nat_port);
	if (!masq_skips(endpoint, p))
		return masq_endpoint(skb, p, endpoint->owner);
	port = host_port_lookup_reply(p);
	if (port)
		return host_port_reply(skb, p, port);
	if (p->bypass)
		fwd_cache_store_egress(skb, p, &p->src, p->sport);
	return VERDICT_NEXT;
}

SEC("tc")
int to_uplink(struct __sk_buff *skb)
{
	return uplink_egress(skb, ETH_HLEN);
}

/* For devices without Ethernet. */
SEC("tc")
int to_uplink_l3(struct __sk_buff *skb)
{
	return uplink_egress(skb, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
