//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The programs, one per direction of a packet as the host sees it. Each is a
 * list of steps, and leaves every packet that is not its own to the next
 * program and the stack. bpf/README.md tells the way of a packet through them.
 */
#include "fast.h"
#include "here.h"
#include "policy.h"
#include "spoof.h"

/*
 * Gives p a new destination, where to is unless that is the host, and brings it there past the
 * stack where it can; else the stack routes it.
 */
static __noinline int send_to(struct __sk_buff *skb, const struct packet *p, struct endpoint *to,
			      const struct addr *addr, __u16 port)
{
	bool fast = to && p->l3 && fast_in(skb, p, to, addr, port);

	if (rewrite(skb, p, SIDE_DST, addr, port))
		return drop(skb, REASON_NOT_WRITTEN);
	return fast ? into_container(skb, p, to, addr, port) : VERDICT_NEXT;
}

/* Gives p a new source, the last thing that happens to it here. */
static __noinline int send_as(struct __sk_buff *skb, const struct packet *p,
			      const struct addr *addr, __u16 port)
{
	if (p->past_stack)
		keep_way_out(skb, p, addr, port);
	if (rewrite(skb, p, SIDE_SRC, addr, port))
		return drop(skb, REASON_NOT_WRITTEN);
	return VERDICT_NEXT;
}

/* Loopback, egress: what the host sends to itself. All of it is for addresses of this host. */
SEC("tc")
int from_host(struct __sk_buff *skb)
{
	struct packet *p = packet_place();
	struct port *port;

	if (!p || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT;
	port = port_lookup(p);
	return port ? here_to_port(skb, p, port) : VERDICT_NEXT;
}

/*
 * An answer to a connection from here whose entries were lost. The stack would
 * refuse it, and so end the connection; dropped, the client's next packet brings
 * the entries back.
 */
static __always_inline bool is_lost_answer(struct __sk_buff *skb, const struct packet *p)
{
	return p->protocol == IPPROTO_TCP && !p->tcp_syn && masq_in_range(p->dport) &&
	       port_of(&p->src, p->sport, p) && fib_is_local(skb) &&
	       socket_for(skb, p) == SOCKET_NONE;
}

/* Host veth, ingress: what a container sends. */
SEC("tc")
int from_container(struct __sk_buff *skb)
{
	struct device *device = device_of(skb);
	struct packet *p = packet_place();
	struct endpoint *sender, *from, *to;
	struct port *port;
	struct flow *flow;
	bool shadow = skb->tc_index == TAG_SHADOW;
	int verdict;

	skb->tc_index = TAG_NONE;
	if (device && spoof_drops(skb, device))
		return VERDICT_DROP;
	if (!p || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT;
	if (device && device->ingress != POLICY_OPEN)
		policy_note(p, device);
	verdict = shadow ? VERDICT_NEXT : way_take(skb, p);
	if (verdict != VERDICT_NEXT)
		return verdict;
	sender = bpf_map_lookup_elem(&endpoints, &p->src);
	from = sender;
	if (from && from->ifindex != skb->ifindex)
		from = NULL; /* not the sender's address, or a bridge is between it and us */
	to = bpf_map_lookup_elem(&endpoints, &p->dst);
	if (to)
		return from ? fast_between(skb, p, from, to) : VERDICT_NEXT;
	if (from) {
		verdict = fast_out(skb, p, from);
		if (verdict != VERDICT_NEXT)
			return verdict;
	}
	flow = masq_reply(p);
	if (flow && sender && flow->owner == sender->owner)
		return here_answer(skb, p, flow);
	if (is_lost_answer(skb, p))
		return drop_of(skb, device ? device->owner : OWNER_HOST, REASON_NO_FLOW);
	port = port_lookup(p);
	if (!port || addr_is_loopback(&p->dst, p->ipv6) || !fib_is_local(skb))
		return VERDICT_NEXT;
	if (!policy_knows_sender(device, sender, port) || !policy_admits_client(p, port))
		return drop_of(skb, port->owner, REASON_CLIENT);
	return here_to_port(skb, p, port);
}

/* Host veth, egress: what a container is sent by the stack, or by us past it. */
SEC("tc")
int to_container(struct __sk_buff *skb)
{
	struct device *device = device_of(skb);
	struct packet *p;

	if (!skb->ingress_ifindex)
		return VERDICT_NEXT; /* the host's own */
	if (device && policy_drops(skb, device))
		return VERDICT_DROP;
	p = packet_place();
	if (!p || parse(skb, p, ETH_HLEN) != PARSED)
		return VERDICT_NEXT;
	return stack_forwards(skb, p) ? VERDICT_DROP : VERDICT_NEXT;
}

/* The answers to the client in key carry what p asks for from now on. */
static __noinline long answer_as_asked(const struct flow_key *key, const struct packet *p,
				       __u64 owner)
{
	struct flow *before = bpf_map_lookup_elem(&flows, key);

	if (before)
		forget_ways(key, p, before);
	return flow_remember(key, p, owner);
}

/*
 * A packet to a host port goes to its container; any other goes on as it is.
 * Only addresses of this host match, whatever the entry says: traffic that
 * merely passes through is not ours (CVE-2025-67499), and a loopback
 * destination on a wire is not believed (CVE-2020-8558).
 */
static __always_inline int to_port(struct __sk_buff *skb, const struct packet *p)
{
	struct port *port = port_lookup(p);
	struct endpoint *endpoint;
	struct flow_key key;
	bool known;

	if (!port || addr_is_loopback(&p->dst, p->ipv6))
		return VERDICT_NEXT;
	/* A connection that is known was for this host when it began, and no connection of its own. */
	flow_in_key(&key, p, &port->addr, port->port);
	known = flow_fits(&key, p, port->owner);
	if (!known && (p->error || !fib_is_local(skb) || is_hosts_own(skb, p)))
		return VERDICT_NEXT;
	if (!policy_admits_client(p, port))
		return drop_of(skb, port->owner, REASON_CLIENT);
	if (!known && answer_as_asked(&key, p, port->owner))
		return drop_of(skb, port->owner, REASON_NOT_WRITTEN);
	endpoint = bpf_map_lookup_elem(&endpoints, &port->addr);
	return send_to(skb, p, endpoint, &port->addr, port->port);
}

/* Uplink, ingress: what comes from the outside. */
static __always_inline int comes_in(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = packet_place();
	struct endpoint *endpoint;
	struct flow_key key;
	struct flow *flow;
	int parsed, verdict;

	if (!p || skb->pkt_type != PACKET_HOST)
		return VERDICT_NEXT;
	parsed = parse(skb, p, l3);
	if (parsed == PARSED_FRAGMENT)
		return hold(skb, p) ? VERDICT_DROP : VERDICT_NEXT;
	if (p->release)
		return release_held(skb, p, BPF_F_INGRESS);
	if (parsed != PARSED)
		return VERDICT_NEXT;
	verdict = l3 && skb->tc_index != TAG_SHADOW ? way_take(skb, p) : VERDICT_NEXT;
	if (verdict != VERDICT_NEXT)
		return verdict;
	flow = masq_reply(p);
	endpoint = flow ? bpf_map_lookup_elem(&endpoints, &flow->addr) : NULL;
	if (flow && flow->owner == (endpoint ? endpoint->owner : OWNER_HOST))
		return send_to(skb, p, endpoint, &flow->addr, flow->port);

	endpoint = bpf_map_lookup_elem(&endpoints, &p->dst);
	if (!endpoint)
		return to_port(skb, p);
	/*
	 * A remote that has a route to the container wants answers from the address that
	 * it sends to: neither masqueraded, nor as of a host port.
	 */
	if (p->error)
		return VERDICT_NEXT;
	flow_in_key(&key, p, &p->dst, p->dport);
	if (!flow_fits(&key, p, endpoint->owner) &&
	    (endpoint->flags & ENDPOINT_MASQ || port_of(&p->dst, p->dport, p) ||
	     bpf_map_lookup_elem(&flows, &key)))
		answer_as_asked(&key, p, endpoint->owner);
	return send_to(skb, p, endpoint, &p->dst, p->dport);
}

SEC("tc")
int from_uplink(struct __sk_buff *skb)
{
	return comes_in(skb, ETH_HLEN);
}

/* The same for devices without Ethernet. */
SEC("tc")
int from_uplink_l3(struct __sk_buff *skb)
{
	return comes_in(skb, 0);
}

/*
 * The host refuses a segment that no socket of it knows. It may be one of a
 * masqueraded connection whose entry was lost: the container's next packet
 * brings that back, if the remote has not been refused meanwhile. A remote whose
 * port looks like a client's is refused, though: it may have used a host port
 * that is closed now, and should learn of it.
 */
#define LEAST_CLIENT_PORT 32768 /* ip_local_port_range's default; others' start higher */

static __always_inline bool is_wrong_refusal(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key = {
		.remote = p->dst,
		.local = p->src,
		.remote_port = p->dport,
		.local_port = p->sport,
	};

	return p->tcp_refuse && p->dport < LEAST_CLIENT_PORT &&
	       fib_ask(skb, p, &p->src) == BPF_FIB_LKUP_RET_NOT_FWDED &&
	       socket_at(skb, p, &key) == SOCKET_NONE;
}

/* The port of the host's connection that was moved is still its own, or free for it again. */
static __always_inline bool keeps_port(const struct packet *p, struct flow_key *key)
{
	struct flow *out = bpf_map_lookup_elem(&flows, key);

	if (!out)
		return !p->error && masq_take(p, key, OWNER_HOST);
	if (!flow_is(out, p, OWNER_HOST))
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
static __noinline int host_sends(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key;
	struct flow *moved;

	if (!p->ported || !masq_in_range(p->sport))
		return VERDICT_NEXT;
	if (is_wrong_refusal(skb, p))
		return drop(skb, REASON_NO_FLOW);
	masq_key(&key, p, &p->src);
	moved = flow_reply(p);
	if (moved) {
		key.local_port = moved->port;
		if (keeps_port(p, &key))
			return send_as(skb, p, &p->src, key.local_port);
	} else {
		key.local_port = p->sport;
		if (!bpf_map_lookup_elem(&flows, &key))
			return VERDICT_NEXT;
	}
	if (p->error)
		return VERDICT_NEXT;
	if (!masq_claim(skb, p, &key, OWNER_HOST))
		return drop(skb, REASON_NO_PORT);
	if (flow_restore(p, &p->src, key.local_port, OWNER_HOST))
		return drop(skb, REASON_NOT_WRITTEN);
	return send_as(skb, p, &p->src, key.local_port);
}

/* Why a container's packet cannot be masqueraded. */
static __always_inline int drop_unparsed(struct __sk_buff *skb, __u64 owner, int parsed)
{
	switch (parsed) {
	case PARSED_FRAGMENT:
		return drop_of(skb, owner, REASON_FRAGMENT);
	case PARSED_PROTOCOL:
		return drop_of(skb, owner, REASON_PROTOCOL);
	default:
		return drop_of(skb, owner, REASON_TRUNCATED);
	}
}

/* The host port that p, sent to the outside, may answer for although no flow says so. */
static __always_inline struct port *lost_port(const struct packet *p)
{
	struct port *port = p->tcp_syn ? NULL : port_of(&p->src, p->sport, p);

	return port && !addr_is_loopback(&port->addr, p->ipv6) ? port : NULL;
}

/* An answer from a host port whose entry was lost goes out as the host's, and brings it back. */
static __noinline int answer_as_port(struct __sk_buff *skb, const struct packet *p,
				     const struct port *port)
{
	struct flow *flow = flow_reply_lost(p);
	struct addr source = port->addr;

	if (flow && flow->owner == port->owner)
		return send_as(skb, p, &flow->addr, flow->port);
	if (addr_is_any(&source, p->ipv6) && !fib_source(skb, p, &source))
		return drop_of(skb, port->owner, REASON_NO_SOURCE);
	if (!p->error && flow_restore(p, &source, port->port, port->owner))
		return drop_of(skb, port->owner, REASON_NOT_WRITTEN);
	return send_as(skb, p, &source, port->port);
}

/* From here on the packet is ours to masquerade: what cannot be translated is dropped. */
static __noinline int masquerade(struct __sk_buff *skb, const struct packet *p, __u64 owner)
{
	struct addr source;
	struct flow_key key;
	struct flow *flow;
	struct port *port;

	if (!fib_source(skb, p, &source))
		return drop_of(skb, owner, REASON_NO_SOURCE);
	masq_key(&key, p, &source);
	if (!masq_find(p, &key, owner)) {
		flow = flow_reply_lost(p);
		if (flow && flow->owner == owner)
			return send_as(skb, p, &flow->addr, flow->port);
		if (masq_find_lost(p, &key, owner))
			return send_as(skb, p, &source, key.local_port);
		port = lost_port(p);
		if (port)
			return answer_as_port(skb, p, port);
		if (p->echo_reply || p->error) /* of or about what is not known */
			return drop_of(skb, owner, REASON_NO_FLOW);
		if (!masq_claim(skb, p, &key, owner))
			return drop_of(skb, owner, REASON_NO_PORT);
	}
	return send_as(skb, p, &source, key.local_port);
}

/* Uplink, egress: what leaves for the outside. */
static __always_inline int goes_out(struct __sk_buff *skb, __u32 l3)
{
	struct packet *p = packet_place();
	struct endpoint *endpoint;
	struct flow *flow;
	struct port *port;
	__u32 tag = skb->tc_index;
	int parsed;

	if (tag == TAG_PAST || tag == TAG_DONE)
		skb->tc_index = TAG_NONE;
	if (!p || tag == TAG_DONE)
		return VERDICT_NEXT;
	parsed = parse(skb, p, l3);
	if (parsed == PARSED_NOT_IP)
		return VERDICT_NEXT;
	endpoint = bpf_map_lookup_elem(&endpoints, &p->src);
	if (!endpoint)
		return parsed == PARSED ? host_sends(skb, p) : VERDICT_NEXT;
	if (parsed == PARSED_FRAGMENT && !masq_exempts(endpoint, p) && hold(skb, p))
		return VERDICT_DROP;
	if (p->release)
		return release_held(skb, p, 0);
	if (l3 && parsed == PARSED && tag != TAG_PAST && stack_forwards(skb, p))
		return VERDICT_DROP;
	p->past_stack = tag == TAG_PAST;
	flow = parsed == PARSED ? flow_reply(p) : NULL;
	if (flow && flow->owner == endpoint->owner)
		return send_as(skb, p, &flow->addr, flow->port);

	if (!masq_exempts(endpoint, p))
		return parsed == PARSED ? masquerade(skb, p, endpoint->owner)
					: drop_unparsed(skb, endpoint->owner, parsed);
	port = parsed == PARSED ? lost_port(p) : NULL;
	if (port)
		return answer_as_port(skb, p, port);
	if (p->past_stack)
		keep_way_out(skb, p, &p->src, p->sport);
	return VERDICT_NEXT;
}

SEC("tc")
int to_uplink(struct __sk_buff *skb)
{
	return goes_out(skb, ETH_HLEN);
}

/* The same for devices without Ethernet. */
SEC("tc")
int to_uplink_l3(struct __sk_buff *skb)
{
	return goes_out(skb, 0);
}

char _license[] SEC("license") = "Dual BSD/GPL";
