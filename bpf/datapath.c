//go:build ignore

// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The programs, one per direction of a packet as the host sees it. Each is a
 * list of steps, and leaves every packet that is not its own to the next
 * program and the stack. bpf/README.md tells the way of a packet through them.
 */
#include "masq.h"
#include "port.h"
#include "rewrite.h"
#include "verdict.h"

/* Gives p a new destination; the stack then routes it. */
static __always_inline int send_to(struct __sk_buff *skb, const struct packet *p,
				   const struct addr *addr, __u16 port)
{
	if (rewrite(skb, p, SIDE_DST, addr, port))
		return drop(skb, REASON_NOT_WRITTEN);
	return VERDICT_NEXT;
}

/* Gives p a new source, the last thing that happens to it here. */
static __always_inline int send_as(struct __sk_buff *skb, const struct packet *p,
				   const struct addr *addr, __u16 port)
{
	if (rewrite(skb, p, SIDE_SRC, addr, port))
		return drop(skb, REASON_NOT_WRITTEN);
	return VERDICT_NEXT;
}

/* An answer to a connection that the host itself has opened from the port's number. */
static __always_inline bool is_hosts_own(struct __sk_buff *skb, const struct packet *p)
{
	struct flow_key key = {
		.remote = p->src,
		.local = p->dst,
		.remote_port = p->sport,
		.local_port = p->dport,
	};

	return socket_at(skb, p, &key) == SOCKET_CONNECTED;
}

/* A packet to a host port goes to its container; any other goes on as it is. */
static __noinline int to_port(struct __sk_buff *skb, const struct packet *p)
{
	struct port *port = port_lookup(p);
	struct flow *flow;

	if (!port || addr_equal(&port->addr, &p->src))
		return VERDICT_NEXT;
	/* A connection that is known was for this host when it began, and no connection of its own. */
	flow = flow_in(p, &port->addr, port->port);
	if (!flow || !flow_fits(flow, p, port->owner)) {
		if (!fib_is_local(skb, p) || is_hosts_own(skb, p))
			return VERDICT_NEXT;
		if (flow_remember(p, &port->addr, port->port, port->owner))
			return drop(skb, REASON_NOT_WRITTEN);
	}
	return send_to(skb, p, &port->addr, port->port);
}

/* Host veth, ingress: what a container sends. */
SEC("tc")
int from_container(struct __sk_buff *skb)
{
	struct packet p;

	if (parse(skb, &p) != PARSED)
		return VERDICT_NEXT;
	return to_port(skb, &p);
}

/* Host veth, egress: what the stack delivers to a container. */
SEC("tc")
int to_container(struct __sk_buff *skb)
{
	struct packet p;
	struct flow *flow;

	if (parse(skb, &p) != PARSED)
		return VERDICT_NEXT;
	flow = flow_reply(&p);
	if (!flow)
		return VERDICT_NEXT;
	return send_as(skb, &p, &flow->addr, flow->port);
}

/* Uplink, ingress: what comes from the outside. */
SEC("tc")
int from_uplink(struct __sk_buff *skb)
{
	struct endpoint *endpoint;
	struct packet p;
	struct flow *flow;

	if (skb->pkt_type != PACKET_HOST || parse(skb, &p) != PARSED)
		return VERDICT_NEXT;
	flow = masq_reply(&p);
	if (flow)
		return send_to(skb, &p, &flow->addr, flow->port);

	endpoint = bpf_map_lookup_elem(&endpoints, &p.dst);
	if (!endpoint)
		return to_port(skb, &p);
	/*
	 * A remote that has a route to the container wants answers from the address that
	 * it sends to: neither masqueraded, nor as of a host port that it used before.
	 */
	flow = flow_in(&p, &p.dst, p.dport);
	if (flow ? !flow_fits(flow, &p, endpoint->owner) : endpoint->flags & ENDPOINT_MASQ)
		flow_remember(&p, &p.dst, p.dport, endpoint->owner);
	return VERDICT_NEXT;
}

/* Why a container's packet cannot be masqueraded. */
static __always_inline int drop_unparsed(struct __sk_buff *skb, int parsed)
{
	switch (parsed) {
	case PARSED_FRAGMENT:
		return drop(skb, REASON_FRAGMENT);
	case PARSED_PROTOCOL:
		return drop(skb, REASON_PROTOCOL);
	default:
		return drop(skb, REASON_TRUNCATED);
	}
}

/* Uplink, egress: what leaves for the outside. */
SEC("tc")
int to_uplink(struct __sk_buff *skb)
{
	struct endpoint *endpoint;
	struct addr source;
	struct packet p;
	struct flow *flow;
	__u16 port;
	int parsed = parse(skb, &p);

	if (parsed == PARSED_NOT_IP)
		return VERDICT_NEXT;
	endpoint = bpf_map_lookup_elem(&endpoints, &p.src);
	if (!endpoint)
		return VERDICT_NEXT;
	if (parsed == PARSED) {
		flow = flow_reply(&p);
		if (flow && flow->owner == endpoint->owner)
			return send_as(skb, &p, &flow->addr, flow->port);
	}

	/* From here on the packet is ours to masquerade: what cannot be translated is dropped. */
	if (!(endpoint->flags & ENDPOINT_MASQ) || addr_is_link_scoped(&p.dst, p.ipv6))
		return VERDICT_NEXT;
	if (parsed != PARSED)
		return drop_unparsed(skb, parsed);
	if (p.echo_reply) /* of a request that is not known */
		return drop(skb, REASON_PROTOCOL);
	if (!fib_source(skb, &p, &source))
		return drop(skb, REASON_NO_SOURCE);
	port = masq_port(skb, &p, &source, endpoint->owner);
	if (!port)
		return drop(skb, REASON_NO_PORT);
	return send_as(skb, &p, &source, port);
}

char _license[] SEC("license") = "Dual BSD/GPL";
