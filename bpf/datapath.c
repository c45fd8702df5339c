//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The programs, one per direction of a packet as the host sees it. Each is a
 * list of steps, and leaves every packet that is not its own to the next
 * program and the stack. bpf/README.md tells the way of a packet through them.
 */
#include "bypass.h"
#include "hairpin.h"
#include "policy.h"
#include "spoof.h"

/*
 * Gives p a new destination, where to is unless that is the host, and brings it there past the
 * stack where it can; else the stack routes it.
 */
static __noinline int forward_dnat(struct __sk_buff *skb, const struct packet *p,
				   struct endpoint *to, const struct addr *addr, __u16 port)
{
	bool fast = to && p->l3 && bypass_from_uplink(skb, p, to, addr, port);

	if (rewrite(skb, p, SIDE_DST, addr, port))
		return drop(skb, REASON_REWRITE);
	return fast ? redirect_to_endpoint(skb, p, to, addr, port) : VERDICT_NEXT;
}

/* Gives p a new source, the last thing that happens to it here. */
static __noinline int forward_snat(struct __sk_buff *skb, const struct packet *p,
				   const struct addr *addr, __u16 port)
{
	if (p->bypass)
		fwd_cache_store_egress(skb, p, addr, port);
	if (rewrite(skb, p, SIDE_SRC, addr, port))
		return drop(skb, REASON_REWRITE);
	return VERDICT_NEXT;
}

/* Loopback, egress: what the host sends to itself. All of it is for addresses of this host. */
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

/*
 * An answer to a connection from here whose entries were lost. The stack would
 * refuse it, and so end the connection; dropped, the client's next packet brings
 * the entries back.
 */
static __always_inline bool hairpin_is_orphan_reply(struct __sk_buff *skb, const struct packet *p)
{
	return p->protocol == IPPROTO_TCP && !p->tcp_syn && masq_in_range(p->dport) &&
	       host_port_reverse(&p->src, p->sport, p) && fib_is_local(skb) &&
	       socket_lookup_packet(skb, p) == SOCKET_NONE;
}

/* Host veth, ingress: what a container sends. */
SEC("tc")
int from_container(struct __sk_buff *skb)
{
	struct device *device = device_lookup(skb);
	struct packet *p = pkt_scratch_get();
	struct endpoint *sender, *from, *to;
	struct host_port *port;
	struct flow *flow;
	bool ct_update = skb->tc_index == TAG_CT_UPDATE;
	int verdict;

	skb->tc_index = TAG_NONE;
	if (device && spoof_drops(skb, device))
		return VERDICT_DROP;
	if (!p || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT;
	if (device && device->ingress_policy != POLICY_OPEN)
		policy_track_egress(p, device);
	verdict = ct_update ? VERDICT_NEXT : fwd_cache_forward(skb, p);
	if (verdict != VERDICT_NEXT)
		return verdict;
	sender = bpf_map_lookup_elem(&endpoints, &p->src);
	from = sender;
	if (from && from->ifindex != skb->ifindex)
		from = NULL; /* not the sender's address, or a bridge is between it and us */
	to = bpf_map_lookup_elem(&endpoints, &p->dst);
	if (to)
		return from ? bypass_to_endpoint(skb, p, from, to) : VERDICT_NEXT;
	if (from) {
		verdict = bypass_to_uplink(skb, p, from);
		if (verdict != VERDICT_NEXT)
			return verdict;
	}
	flow = masq_reply(p);
	if (flow && sender && flow->owner == sender->owner)
		return hairpin_reply(skb, p, flow);
	if (hairpin_is_orphan_reply(skb, p))
		return drop_for(skb, device ? device->owner : OWNER_HOST, REASON_NO_FLOW);
	port = host_port_lookup(p);
	if (!port || addr_is_loopback(&p->dst, p->ipv6) || !fib_is_local(skb))
		return VERDICT_NEXT;
	if (!host_port_knows_sender(device, sender, port) || !host_port_allows(p, port))
		return drop_for(skb, port->owner, REASON_SRC_RANGE);
	return hairpin_to_endpoint(skb, p, port);
}

/* Host veth, egress: what a container is sent by the stack, or by us past it. */
SEC("tc")
int to_container(struct __sk_buff *skb)
{
	struct device *device = device_lookup(skb);
	struct packet *p;

	if (!skb->ingress_ifindex)
		return VERDICT_NEXT; /* the host's own */
	if (device && policy_drops(skb, device))
		return VERDICT_DROP;
	p = pkt_scratch_get();
	if (!p || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT;
	return offload_track(skb, p) ? VERDICT_DROP : VERDICT_NEXT;
}

/* The answers to the client in key carry what p asks for from now on. */
static __noinline long flow_dnat_replace(const struct flow_key *key, const struct packet *p,
					 __u64 owner)
{
	struct flow *before = bpf_map_lookup_elem(&flows, key);

	if (before)
		fwd_cache_forget(key, p, before);
	return flow_dnat_store(key, p, owner);
}

/*
 * A packet to a host port goes to its container; any other goes on as it is.
 * Only addresses of this host match, whatever the entry says: traffic that
 * merely passes through is not ours (CVE-2025-67499), and a loopback
 * destination on a wire is not believed (CVE-2020-8558).
 */
static __always_inline int host_port_forward(struct __sk_buff *skb, const struct packet *p)
{
	struct host_port *port = host_port_lookup(p);
	struct endpoint *endpoint;
	struct flow_key key;
	bool known;

	if (!port || addr_is_loopback(&p->dst, p->ipv6))
		return VERDICT_NEXT;
	/* A connection that is known was for this host when it began, and no connection of its own. */
	flow_dnat_key(&key, p, &port->target_addr, port->target_port);
	known = flow_dnat_matches(&key, p, port->owner);
	if (!known && (p->icmp_error || !fib_is_local(skb) || is_host_connection(skb, p)))
		return VERDICT_NEXT;
	if (!host_port_allows(p, port))
		return drop_for(skb, port->owner, REASON_SRC_RANGE);
	if (!known && flow_dnat_replace(&key, p, port->owner))
		return drop_for(skb, port->owner, REASON_REWRITE);
	endpoint = bpf_map_lookup_elem(&endpoints, &port->target_addr);
	return forward_dnat(skb, p, endpoint, &port->target_addr, port->target_port);
}

/* Uplink, ingress: what comes from the outside. */
static __always_inline int uplink_ingress(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = pkt_scratch_get();
	struct endpoint *endpoint;
	struct flow_key key;
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
	flow = masq_reply(p);
	endpoint = flow ? bpf_map_lookup_elem(&endpoints, &flow->nat_addr) : NULL;
	if (flow && flow->owner == (endpoint ? endpoint->owner : OWNER_HOST))
		return forward_dnat(skb, p, endpoint, &flow->nat_addr, flow->nat_port);

	endpoint = bpf_map_lookup_elem(&endpoints, &p->dst);
	if (!endpoint)
		return host_port_forward(skb, p);
	/*
	 * A remote that has a route to the container wants answers from the address that
	 * it sends to: neither masqueraded, nor as of a host port.
	 */
	if (p->icmp_error)
		return VERDICT_NEXT;
	flow_dnat_key(&key, p, &p->dst, p->dport);
	if (!flow_dnat_matches(&key, p, endpoint->owner) &&
	    (endpoint->flags & ENDPOINT_MASQ || host_port_reverse(&p->dst, p->dport, p) ||
	     bpf_map_lookup_elem(&flows, &key)))
		flow_dnat_replace(&key, p, endpoint->owner);
	return forward_dnat(skb, p, endpoint, &p->dst, p->dport);
}

SEC("tc")
int from_uplink(struct __sk_buff *skb)
{
	return uplink_ingress(skb, ETH_HLEN);
}

/* The same for devices without Ethernet. */
SEC("tc")
int from_uplink_l3(struct __sk_buff *skb)
{
	return uplink_ingress(skb, 0);
}

/*
 * The host refuses a segment that no socket of it knows. It may be one of a
 * masqueraded connection whose entry was lost: the container's next packet
 * brings that back, if the remote has not been refused meanwhile. A remote whose
 * port looks like a client's is refused, though: it may have used a host port
 * that is closed now, and should learn of it.
 */
#define LEAST_CLIENT_PORT 32768 /* ip_local_port_range's default; others' start higher */

static __always_inline bool host_rst_is_spurious(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key = {
		.remote = p->dst,
		.local = p->src,
		.remote_port = p->dport,
		.local_port = p->sport,
	};

	return p->tcp_rst_noack && p->dport < LEAST_CLIENT_PORT &&
	       fib_lookup(skb, p, &p->src) == BPF_FIB_LKUP_RET_NOT_FWDED &&
	       socket_lookup(skb, p, &key) == SOCKET_NONE;
}

/* The port of the host's connection that was moved is still its own, or free for it again. */
static __always_inline bool host_keeps_port(const struct packet *p, struct flow_key *key)
{
	struct flow *out = bpf_map_lookup_elem(&flows, key);

	if (!out)
		return !p->icmp_error && masq_insert(p, key, OWNER_HOST);
	if (!flow_is_from(out, p, OWNER_HOST))
		return false;
	flow_touch(key, out, p, false);
	return true;
}

/*
 * A socket of the host can be bound to a port of the masquerading range after a
 * container's connection to the same remote has got it. The replies are the
 * container's, so the host's connection leaves by another port, as a container's
 * would: one entry for its replies, and one that keeps it there.
 */
static __noinline int host_masquerade(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key;
	struct flow *moved;

	if (!p->has_ports || !masq_in_range(p->sport))
		return VERDICT_NEXT;
	if (host_rst_is_spurious(skb, p))
		return drop(skb, REASON_NO_FLOW);
	masq_key(&key, p, &p->src);
	moved = flow_reply(p);
	if (moved) {
		key.local_port = moved->nat_port;
		if (host_keeps_port(p, &key))
			return forward_snat(skb, p, &p->src, key.local_port);
	} else {
		key.local_port = p->sport;
		if (!bpf_map_lookup_elem(&flows, &key))
			return VERDICT_NEXT;
	}
	if (p->icmp_error)
		return VERDICT_NEXT;
	if (!masq_alloc_port(skb, p, &key, OWNER_HOST))
		return drop(skb, REASON_NO_PORT);
	if (flow_dnat_restore(p, &p->src, key.local_port, OWNER_HOST))
		return drop(skb, REASON_REWRITE);
	return forward_snat(skb, p, &p->src, key.local_port);
}

/* Why a container's packet cannot be masqueraded. */
static __always_inline int masq_drop_unparsed(struct __sk_buff *skb, __u64 owner, int parsed)
{
	switch (parsed) {
	case PARSED_FRAGMENT:
		return drop_for(skb, owner, REASON_FRAGMENT);
	case PARSED_PROTOCOL:
		return drop_for(skb, owner, REASON_PROTOCOL);
	default:
		return drop_for(skb, owner, REASON_TRUNCATED);
	}
}

/* The host port that p, sent to the outside, may answer for although no flow says so. */
static __always_inline struct host_port *host_port_replying(const struct packet *p)
{
	struct host_port *port = p->tcp_syn ? NULL : host_port_reverse(&p->src, p->sport, p);

	return port && !addr_is_loopback(&port->target_addr, p->ipv6) ? port : NULL;
}

/* An answer from a host port whose entry was lost goes out as the host's, and brings it back. */
static __noinline int host_port_reply(struct __sk_buff *skb, const struct packet *p,
				      const struct host_port *port)
{
	struct flow *flow = flow_reply_lost(p);
	struct addr source = port->target_addr;

	if (flow && flow->owner == port->owner)
		return forward_snat(skb, p, &flow->nat_addr, flow->nat_port);
	if (addr_is_any(&source, p->ipv6) && !fib_source(skb, p, &source))
		return drop_for(skb, port->owner, REASON_NO_SOURCE);
	if (!p->icmp_error && flow_dnat_restore(p, &source, port->target_port, port->owner))
		return drop_for(skb, port->owner, REASON_REWRITE);
	return forward_snat(skb, p, &source, port->target_port);
}

/* From here on the packet is ours to masquerade: what cannot be translated is dropped. */
static __noinline int masquerade(struct __sk_buff *skb, const struct packet *p, __u64 owner)
{
	struct addr source;
	struct flow_key key;
	struct flow *flow;
	struct host_port *port;

	if (!fib_source(skb, p, &source))
		return drop_for(skb, owner, REASON_NO_SOURCE);
	masq_key(&key, p, &source);
	if (!masq_lookup(p, &key, owner)) {
		flow = flow_reply_lost(p);
		if (flow && flow->owner == owner)
			return forward_snat(skb, p, &flow->nat_addr, flow->nat_port);
		if (masq_recover(p, &key, owner))
			return forward_snat(skb, p, &source, key.local_port);
		port = host_port_replying(p);
		if (port)
			return host_port_reply(skb, p, port);
		if (p->echo_reply || p->icmp_error) /* of or about what is not known */
			return drop_for(skb, owner, REASON_NO_FLOW);
		if (!masq_alloc_port(skb, p, &key, owner))
			return drop_for(skb, owner, REASON_NO_PORT);
	}
	return forward_snat(skb, p, &source, key.local_port);
}

/* Uplink, egress: what leaves for the outside. */
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
	endpoint = bpf_map_lookup_elem(&endpoints, &p->src);
	if (!endpoint)
		return parsed == PARSED ? host_masquerade(skb, p) : VERDICT_NEXT;
	if (parsed == PARSED_FRAGMENT && !masq_skips(endpoint, p) && frag_queue_add(skb, p))
		return VERDICT_DROP;
	if (p->flush_queue)
		return frag_queue_flush(skb, p, 0);
	if (l3 && parsed == PARSED && tag != TAG_BYPASS && offload_track(skb, p))
		return VERDICT_DROP;
	p->bypass = tag == TAG_BYPASS;
	flow = parsed == PARSED ? flow_reply(p) : NULL;
	if (flow && flow->owner == endpoint->owner)
		return forward_snat(skb, p, &flow->nat_addr, flow->nat_port);

	if (!masq_skips(endpoint, p))
		return parsed == PARSED ? masquerade(skb, p, endpoint->owner)
					: masq_drop_unparsed(skb, endpoint->owner, parsed);
	port = parsed == PARSED ? host_port_replying(p) : NULL;
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

/* The same for devices without Ethernet. */
SEC("tc")
int to_uplink_l3(struct __sk_buff *skb)
{
	return uplink_egress(skb, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
