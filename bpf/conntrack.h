/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * What conntrack knows of a connection: its tuples before and after translation, and its state. The
 * programs read the kernel's own structures (kernel.h).
 *
 * A packet that has passed conntrack carries the address of its entry, which flows remember. The kernel
 * frees an entry only after it has marked it as dying, and uses the memory for other entries, or gives it
 * back. So an address is only a hint: an entry counts if it is alive and has the tuples of the connection.
 * Reading from an address without memory yields 0.
 */
#pragma once

#include "addr.h"
#include "kernel.h"
#include "packet.h"
#include "scratch.h"

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

union nf_inet_addr {
	__u32 all[4];
};

union nf_conntrack_man_proto {
	__be16 all;
};

struct nf_conntrack_man {
	union nf_inet_addr u3;
	union nf_conntrack_man_proto u;
	__u16 l3num;
};

struct nf_conntrack_tuple {
	struct nf_conntrack_man src;
	struct {
		union nf_inet_addr u3;
		union {
			__be16 all;
		} u;
		__u8 protonum;
	} dst;
};

struct nf_conntrack_tuple_hash {
	struct nf_conntrack_tuple tuple;
};

struct nf_conntrack_zone {
	__u16 id;
};

struct ip_ct_tcp {
	__u8 state;
};

union nf_conntrack_proto {
	struct ip_ct_tcp tcp;
};

struct nf_conn {
	union nf_conntrack_proto proto;
	__u32 timeout;
	struct nf_conntrack_zone zone;
	struct nf_conntrack_tuple_hash tuplehash[2];
	unsigned long status;
};

#pragma clang attribute pop

/* The lowest bits of sk_buff._nfct: enum ip_conntrack_info. The rest is the address of the entry. */
#define CT_INFO_MASK	     7
#define CT_ESTABLISHED	     0
#define CT_ESTABLISHED_REPLY 3

/* Bits of nf_conn.status: enum ip_conntrack_status. */
#define CT_EXPECTED   (1U << 0)
#define CT_SEEN_REPLY (1U << 1)
#define CT_CONFIRMED  (1U << 3)
#define CT_SRC_NAT    (1U << 4)
#define CT_DST_NAT    (1U << 5)
#define CT_NAT	      (CT_SRC_NAT | CT_DST_NAT)
#define CT_SEQ_ADJUST (1U << 6)
#define CT_DYING      (1U << 9)
#define CT_TEMPLATE   (1U << 11)
#define CT_NAT_CLASH  (1U << 12)
#define CT_HELPER     (1U << 13)

/* enum tcp_conntrack */
#define CT_TCP_SYN_RECV	 2
#define CT_TCP_TIME_WAIT 7

#define CT_NEEDED (CT_SEEN_REPLY | CT_CONFIRMED)
#define CT_FORBIDDEN                                                                               \
	(CT_EXPECTED | CT_SEQ_ADJUST | CT_DYING | CT_TEMPLATE | CT_NAT_CLASH | CT_HELPER)

/* A connection that conntrack translates, in the direction of a packet. */
struct ct_translation {
	struct fwd_key in;  /* before: the tuple at the hook that receives it */
	struct fwd_key out; /* after: at the last hook. The key's other members are as in in */
	__u64 ct;	    /* the address of conntrack's entry */
	bool reply;	    /* the packet goes to the connection's opener */
	bool sent; /* from_container sends it out at once, by next, for to_uplink; it may be unchanged */
	struct next_hop next;
};

SCRATCH(ct_scratch, struct ct_translation);

/* Returns the 4 bytes at an address. */
static __always_inline __u32 kernel_u32(__u64 address)
{
	return KERNEL_AT(struct nf_conntrack_tuple, address)->src.u3.all[0];
}

/* Sets addr to that of a tuple's side. */
static __always_inline void ct_set_addr(struct addr *addr, const union nf_inet_addr *from,
					bool ipv6)
{
	__u32 *words = (__u32 *)addr;

	if (!ipv6) {
		addr_from_ipv4(addr, from->all[0]);
		return;
	}
	words[0] = from->all[0];
	words[1] = from->all[1];
	words[2] = from->all[2];
	words[3] = from->all[3];
}

/* Sets the addresses and ports of key to those of conntrack's tuple for one direction. invert: for the other. */
static __always_inline void ct_set_tuple(struct fwd_key *key, __u64 ct, __u32 direction,
					 bool invert)
{
	const struct nf_conntrack_tuple *tuple =
		KERNEL_AT(struct nf_conntrack_tuple,
			  ct + bpf_core_field_offset(struct nf_conn, tuplehash) +
				  direction * bpf_core_type_size(struct nf_conntrack_tuple_hash) +
				  bpf_core_field_offset(struct nf_conntrack_tuple_hash, tuple));
	bool ipv6 = tuple->src.l3num == AF_INET6;

	key->ipv6 = ipv6;
	key->protocol = tuple->dst.protonum;
	ct_set_addr(invert ? &key->dst : &key->src, &tuple->src.u3, ipv6);
	ct_set_addr(invert ? &key->src : &key->dst, &tuple->dst.u3, ipv6);
	*(invert ? &key->dport : &key->sport) = bpf_ntohs(tuple->src.u.all);
	*(invert ? &key->sport : &key->dport) = bpf_ntohs(tuple->dst.u.all);
}

/* Returns what a packet carries: the address of conntrack's entry and enum ip_conntrack_info; or 0. */
static __always_inline __u64 ct_word(struct __sk_buff *skb)
{
	const struct sk_buff *packet = bpf_cast_to_kern_ctx(skb);

	return bpf_core_field_exists(packet->_nfct) ? packet->_nfct : 0;
}

/* Returns the lower bits of an entry's status. */
static __always_inline __u32 ct_status(__u64 ct)
{
	return kernel_u32(ct + bpf_core_field_offset(struct nf_conn, status) +
			  (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? 4 : 0));
}

/* Reports whether the entry is alive, and what it says can be repeated by two rewrites. */
static __always_inline bool ct_is_usable(__u64 ct)
{
	__u32 status = ct_status(ct);
	__u32 timeout = kernel_u32(ct + bpf_core_field_offset(struct nf_conn, timeout));

	if ((status & CT_NEEDED) != CT_NEEDED || !(status & CT_NAT) || status & CT_FORBIDDEN)
		return false;
	if (bpf_core_field_exists(struct nf_conn, zone) &&
	    KERNEL_AT(struct nf_conntrack_zone, ct + bpf_core_field_offset(struct nf_conn, zone))
		    ->id)
		return false;
	return (__s32)(timeout - (__u32)bpf_jiffies64()) > 0;
}

/* Returns the state of a TCP connection. After a SYN, and a SYN+ACK for it, that is CT_TCP_SYN_RECV. */
static __always_inline __u8 ct_tcp_state(__u64 ct)
{
	if (!bpf_core_field_exists(struct nf_conn, proto) ||
	    !bpf_core_field_exists(struct ip_ct_tcp, state))
		return CT_TCP_SYN_RECV;
	return KERNEL_AT(struct ip_ct_tcp, ct + bpf_core_field_offset(struct nf_conn, proto))
		->state;
}

/* Reports whether conntrack has seen both ends open a TCP connection, and none reset it. */
static __always_inline bool ct_tcp_is_open(__u64 ct)
{
	__u8 state = ct_tcp_state(ct);

	return state >= CT_TCP_SYN_RECV && state <= CT_TCP_TIME_WAIT;
}

/* Reports whether two tuples have the same addresses, ports, and protocol. */
static __always_inline bool ct_tuple_equal(const struct fwd_key *a, const struct fwd_key *b)
{
	return addr_equal(&a->src, &b->src) && addr_equal(&a->dst, &b->dst) &&
	       a->sport == b->sport && a->dport == b->dport && a->protocol == b->protocol &&
	       a->ipv6 == b->ipv6;
}

static __always_inline bool ct_changes_src(const struct ct_translation *t)
{
	return t->in.sport != t->out.sport || !addr_equal(&t->in.src, &t->out.src);
}

static __always_inline bool ct_changes_dst(const struct ct_translation *t)
{
	return t->in.dport != t->out.dport || !addr_equal(&t->in.dst, &t->out.dst);
}

/*
 * Reports whether IPVS chooses the backend: conntrack has another destination, but no rule has set it. IPVS has timeouts
 * of its own, and ends a connection whose packets it does not see.
 */
static __always_inline bool ct_is_ipvs(const struct ct_translation *t)
{
	return (t->reply ? ct_changes_src(t) : ct_changes_dst(t)) &&
	       !(ct_status(t->ct) & CT_DST_NAT);
}

/*
 * Sets the tuples in ct_scratch to those of the entry at its address, in the given direction. Returns
 * false if the entry is gone, or cannot be used. Only if it has not changed meanwhile: the program may
 * have been interrupted.
 */
__noinline int ct_read(__u32 reply)
{
	struct ct_translation *t = ct_scratch_get();

	if (!t || !config.sees_hooks || !t->ct)
		return false;
	if (!bpf_core_field_exists(struct nf_conn, tuplehash))
		return false;
	t->reply = !!reply;
	ct_set_tuple(&t->out, t->ct, !reply, true);
	ct_set_tuple(&t->in, t->ct, !!reply, false);
	return ct_is_usable(t->ct) && !ct_is_ipvs(t) &&
	       (t->in.protocol != IPPROTO_TCP || ct_tcp_is_open(t->ct));
}

/*
 * Reports whether the host's rules have changed the source of the packet in pkt_scratch, which is its connection's opener's
 * and has passed the stack, or is past it. If so, in of ct_scratch has the tuple before.
 */
__noinline int ct_source_changed(struct __sk_buff *skb)
{
	struct ct_translation *t = ct_scratch_get();
	struct packet *p = pkt_scratch_get();
	__u64 word;

	if (!t || !p || !config.sees_hooks)
		return false;
	if (p->decided.ct_nat)
		return !t->reply;
	if (!bpf_core_field_exists(struct nf_conn, tuplehash))
		return false;
	word = ct_word(skb);
	if (word <= CT_INFO_MASK || (word & CT_INFO_MASK) >= CT_ESTABLISHED_REPLY)
		return false;
	word &= ~(__u64)CT_INFO_MASK;
	if (!(ct_status(word) & CT_SRC_NAT))
		return false;
	ct_set_tuple(&t->out, word, 1, true);
	ct_set_tuple(&t->in, word, 0, false);
	return ct_tuple_equal(&t->out, packet_tuple(p));
}

/* Reports whether the packet, which has passed the stack, is of a connection that the host's rules translate, open or closed. */
static __always_inline bool ct_translates(struct __sk_buff *skb)
{
	__u64 word = config.sees_hooks ? ct_word(skb) : 0;

	return word > CT_INFO_MASK && ct_status(word & ~(__u64)CT_INFO_MASK) & CT_NAT;
}

/*
 * Sets ct_scratch by what the packet, which has passed the stack, carries. Returns false if that is no
 * established connection, or not one of the packet's tuple: an ICMP error carries another one's.
 */
__noinline int ct_read_packet(struct __sk_buff *skb)
{
	struct ct_translation *t = ct_scratch_get();
	struct packet *p = pkt_scratch_get();
	__u64 word;
	__u32 info;

	if (!t || !p || !config.sees_hooks)
		return false;
	word = ct_word(skb);
	info = word & CT_INFO_MASK;
	if (info != CT_ESTABLISHED && info != CT_ESTABLISHED_REPLY)
		return false;
	t->ct = word - info;
	return ct_read(info == CT_ESTABLISHED_REPLY) && ct_tuple_equal(&t->out, packet_tuple(p));
}
