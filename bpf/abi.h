/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Everything the programs share with user space: map keys and values, the
 * configuration, and the constants that both sides name. abi_*.h have parts of it.
 *
 * bpf2go generates the Go types from the BTF of these structs. Padding is
 * explicit and zero, because keys are compared as bytes. Ports are in host byte
 * order, so `bpftool map dump` prints them the way people write them.
 *
 * Fixed from here on, so that any version can clean up after any other:
 *  - the names of the maps and of the programs;
 *  - the first three members of host_config;
 *  - the owner comes first in every value that has one (in drops: in the key), and
 *    the network follows it in devices, endpoints and host_ports.
 * Any other change of a layout is a change of ABI: raise EBPFNET_ABI.
 */
#pragma once

#include <linux/bpf.h>

#define EBPFNET_ABI 13

/* An IPv6 address, or an IPv4 address as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2). */
struct addr {
	__u8 bytes[16];
} __attribute__((aligned(4)));

/* How programs are attached to the devices that other tools share. */
enum attach {
	ATTACH_TCX = 1,	   /* BPF links, kernel 6.6 */
	ATTACH_CLSACT = 2, /* tc filters */
};

/* Ports from first on. */
struct port_range {
	__u16 first;
	__u16 count; /* 0: none */
};

/*
 * How far a flow has come. Each state has an idle time, after which the flow loses
 * its port; states and defaults are netfilter's (nf_conntrack_proto_tcp.c and
 * Documentation/networking/nf_conntrack-sysctl.rst).
 */
enum flow_state {
	FLOW_SYN_SENT = 0,    /* the opener has sent SYN, or a packet of an unknown connection */
	FLOW_SYN_RECV = 1,    /* the other side has sent SYN+ACK */
	FLOW_ESTABLISHED = 2, /* the opener has acknowledged that */
	FLOW_FIN_WAIT = 3,    /* the container has sent FIN */
	FLOW_CLOSE_WAIT = 4,  /* the remote has sent FIN, and the container has acknowledged it */
	FLOW_LAST_ACK = 5,    /* then the container has sent FIN, too */
	FLOW_TIME_WAIT = 6,   /* both FINs are acknowledged */
	FLOW_CLOSE = 7,	      /* RST */
	FLOW_UDP = 8,
	FLOW_UDP_STREAM = 9, /* both sides have sent for more than two seconds */
	FLOW_ICMP = 10,	     /* echo */
	FLOW_OTHER = 11,     /* protocols without ports */
	FLOW_STATES = 12,
} __attribute__((packed)); /* one byte */

/* What the datapath was loaded with: frozen in .rodata, pinned as maps/config. */
struct host_config {
	__u32 abi; /* EBPFNET_ABI */
	enum attach attach;
	__u64 build;	    /* hash of the programs' code */
	__u32 revision;	    /* newer programs have a higher one */
	__u32 flow_buckets; /* of flow_table */
	__u64 secret[2];    /* key of hashes that nobody may predict; survives upgrades */
	struct port_range masq_ports[2]; /* ports (and ICMP ids) that masquerading allocates */
	__u32 timeout[FLOW_STATES];	 /* idle time of each state, in ticks of 2^30 ns */
	__u32 cache_jiffies;		 /* how long a cached decision holds: at most 200 ms */
	__u32 sees_hooks;		 /* 1: programs can see the stack's hooks (stack_hooks.h) */
};

/* Set by the loader before the programs are verified, constant from then on. */
const volatile struct host_config config = {
	.abi = EBPFNET_ABI,
	.attach = ATTACH_TCX,
	.flow_buckets = 1,
	.masq_ports = {{.first = 1024, .count = 28976}},
	.cache_jiffies = 50,
};

enum endpoint_flags {
	ENDPOINT_MASQ = 1,	   /* masquerade what this address sends to the outside */
	ENDPOINT_MASQ_TUNNELS = 2, /* tunnels, too (IPIP, GRE, ESP, ...) */
};

/* Between two endpoints, the bits that both have apply. */
enum fast_path {
	FAST_PATH_NEVER = 0,
	FAST_PATH_ESTABLISHED = 1, /* established connections bypass the stack */
	FAST_PATH_ALWAYS = 3,	   /* and so do new ones */
	FAST_PATH_AUTO = 5,	   /* as always while the stack has no hooks, else as established */
} __attribute__((packed));	   /* one byte */

/* endpoints: a container's address on this host. Key: struct addr. */
struct endpoint {
	__u64 owner;	     /* the attachment's token */
	__u32 network;	     /* the network's token */
	__u32 ifindex;	     /* host end of the veth */
	__u8 mac[6];	     /* container end */
	__u8 host_mac[6];    /* host end */
	struct addr gateway; /* the host's address on the veth; hairpin clients appear as it */
	enum endpoint_flags flags;
	__u32 nonmasq_set; /* set of destinations in prefixes, or 0 */
	__u16 mtu;	   /* of the veth */
	enum fast_path fast_path;
	__u8 pad;
	__u64 container; /* the container's token: it may have several attachments */
	__u32 route_set; /* as in struct device */
	__u32 pad2;
};

enum device_flags {
	DEVICE_ANTI_SPOOF = 1,	/* the container sends from its own MAC and addresses only */
	DEVICE_BRIDGED = 2,	/* behind a bridge: others receive what it broadcasts */
	DEVICE_ANY_ADDRESS = 4, /* has no addresses of its own, and may use any unused one */
	DEVICE_SHAPED = 8,	/* a queue limits what it receives: nothing may bypass it */
	DEVICE_POD = 16,	/* for user space: container is the token of its pod's UID */
};

/* devices: the host end of a container's veth. Key: ifindex. An address of all zeros: none. */
struct device {
	__u64 owner;
	__u32 network;
	enum device_flags flags;
	struct addr addr4; /* the container's first; endpoints has all of them */
	struct addr addr6;
	struct addr gateway4; /* the host's */
	struct addr gateway6;
	__u8 mac[6];	  /* container end */
	__u16 policy;	  /* index in policies; 0: no rules */
	__u64 container;  /* as in struct endpoint */
	__u32 route_set;  /* set of routes in prefixes, or 0 */
	__u32 link_local; /* hash of its link-local address besides the MAC's; 0: none */
};

enum host_port_dir {
	HOST_PORT_FORWARD = 0, /* host address and port to container address and port */
	HOST_PORT_REVERSE = 1, /* the inverse: restores connections whose flow was lost */
} __attribute__((packed));     /* one byte */

/*
 * host_ports: a port of the host that is forwarded to a container. The host
 * address is one of the host's, or any: 0.0.0.0 (mapped) for IPv4, :: for IPv6.
 */
struct host_port_key {
	struct addr addr;
	__u16 port;
	__u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	enum host_port_dir dir;
};

struct host_port {
	__u64 owner;
	__u32 network;
	__u16 target_port;
	__u16 pad;
	struct addr target_addr;
	__u32 src_range_set; /* set of clients in prefixes, or 0: everyone */
	__u32 pad2;
};

enum flow_kind {
	FLOW_SNAT = 1,	   /* opened by a container and masqueraded; translates its replies */
	FLOW_DNAT = 2,	   /* opened to a container; replies leave from where the client sent */
	FLOW_POLICY = 3,   /* admitted by the rules of a container */
	FLOW_RST_HELD = 4, /* the host has refused a packet of this remote; its RST was held back */
	FLOW_OFFLOAD = 5,  /* may bypass the stack: struct offload */
	FLOW_PAIR = 6,	   /* admitted by the rules of both containers: policy_pair.h */
	FLOW_CT_NAT = 7,   /* translated by the host's rules: struct ct_nat */
} __attribute__((packed)); /* one byte */

/* The container is that of the flow's owner; the remote is the other side. */
enum flow_flags {
	FLOW_REPLIED = 1,      /* the side that did not open the flow has sent, too */
	FLOW_PICKED_UP = 2,    /* TCP: began with another packet than SYN */
	FLOW_FIN = 4,	       /* TCP: the container has sent FIN */
	FLOW_REMOTE_FIN = 8,   /* TCP: the container has acknowledged the remote's FIN */
	FLOW_FIN_UNACKED = 16, /* TCP: a FIN of the remote that is not acknowledged yet */
	FLOW_RST_UNKNOWN = 32, /* TCP: a RST with an unexpected number has arrived */
	FLOW_CONTINUES = 64,   /* UDP: more than one packet and one reply */
	FLOW_BY_REMOTE = 128,  /* FLOW_POLICY, FLOW_PAIR: the remote has opened it */
} __attribute__((packed));     /* one byte */

/* Of a connection that rules have revoked. */
enum flow_reset {
	FLOW_RESET_LOCAL = 1,  /* the container has got a RST, with the number ack */
	FLOW_RESET_REMOTE = 2, /* the remote has got one, with the number expected */
	FLOW_PEER_HOST = 4,    /* FLOW_POLICY: the peer is the container's own node */
	FLOW_UNCONFIRMED = 8,  /* FLOW_POLICY: no last hook has seen the translated peer */
} __attribute__((packed));     /* one byte */

/*
 * A flow is a translated connection, or one whose replies a policy admits. One entry is all the
 * state of a flow. It translates one direction; the other needs none, or finds it by probing
 * (masq.h). For ICMP echo the identifier stands for the port of the side that
 * sent the request; the port of the other side is 0.
 *
 * An entry is valid as long as its owner has the endpoint. Lookups check that.
 */
struct flow_key {
	struct addr remote; /* the side that is not this entry's endpoint */
	struct addr local;  /* FLOW_SNAT: our masquerading address; else the container's */
	__u16 remote_port;  /* FLOW_DNAT: as the container sees it */
	__u16 local_port;
	__u8 protocol;
	enum flow_kind kind;
	__u16 pad;
};

/*
 * The host itself. Its SNAT flows are host flows: what the host sends, from its sockets
 * or translated by its conntrack, from a port that may be ours.
 */
#define OWNER_HOST 0

struct flow {
	__u64 owner;
	/*
	 * FLOW_SNAT: the container's; FLOW_DNAT: the one the client used; FLOW_POLICY: the peer as
	 * the rules have seen it; else 0
	 */
	struct addr nat_addr;
	__u32 last_seen; /* in ticks of 2^30 ns since boot */
	__u16 nat_port;
	enum flow_state state;
	enum flow_flags flags;
	union {
		__u32 uplink; /* the device by which the remote was first reached; 0: none */
		__u32 policy_generation; /* FLOW_POLICY, FLOW_PAIR: of the rules that admit it */
	};
	__u32 ack;	  /* TCP: the last number that the container has acknowledged */
	__u32 expected;	  /* TCP: the expected ACK: of the SYN, the SYN+ACK or the remote's FIN */
	__u32 remote_end; /* TCP: the sequence number after the remote's last packet */
	/* FLOW_DNAT: the client's own; FLOW_SNAT of a hairpin client: represents the host port */
	__u16 remote_port;
	__u16 created; /* the last 16 bits of the time, in ticks */
	__u8 probe;    /* FLOW_SNAT: which candidate its port is */
	enum flow_reset reset;
	__u8 pad[2];
	__u64 payer; /* the container against which the flow counts: the opener, or if outside, the owner */
};

/* admitted_flows: a flow to create, in which both sides have sent. */
struct admitted_flow {
	__u64 owner;
	__u32 last_seen;       /* as in struct flow: when the policy was set */
	enum flow_flags flags; /* FLOW_BY_REMOTE, or 0 */
	__u8 pad[3];
};

#define MASQ_CANDIDATES 64 /* candidate ports of a flow, masq_port.h */
#define MASQ_NEAR	8  /* candidates that most moved flows have at most */
#define MOVED_FLOWS	131072
#define MOVED_EPOCH	(1U << 30)

/*
 * moved_flows: when a flow of the place last did not have its first candidate, and when one had
 * candidate MASQ_NEAR or a later one. In ticks since MOVED_EPOCH ticks before boot, so 0 is longer
 * ago than any idle time.
 */
struct moved {
	__u32 seen;
	__u32 seen_far;
};

/* Of side 0; shift left by one for side 1. */
enum offload_state {
	OFFLOAD_DELIVERED = 1, /* the stack has delivered a packet of this side unchanged */
	OFFLOAD_SYN = 4,       /* this side has sent SYN since */
	OFFLOAD_FIN = 16,      /* this side has sent FIN */
	OFFLOAD_FIN_ACK = 64,  /* the other side has acknowledged this side's FIN */
} __attribute__((packed));     /* one byte */

/*
 * The flow of kind FLOW_OFFLOAD: a connection that the stack forwards unchanged. In the key, remote is
 * side 0, the one with the lower port, or if equal, address; local is side 1. What the table reads is
 * where struct flow has it.
 */
struct offload {
	__u64 owner;	   /* of one of the endpoints, with which the flow ends */
	__u32 ct_acked[2]; /* TCP: the end of each side's acknowledged data in conntrack */
	__u32 ct_ack[2];   /* TCP: the end of the other side's data in conntrack */
	__u32 ct_seen;	   /* when conntrack last saw the connection, in ticks of 2^30 ns */
	__u8 slow[2];	   /* TCP: data of this side has passed the stack, and none since */
	enum flow_state flow_state; /* that of an assured flow if both sides were delivered */
	enum offload_state state;   /* bits */
	__u32 uplink;		    /* ifindex towards the side that is not an endpoint, or 0 */
	__u32 fin_seq[2];	    /* TCP: the sequence number after each side's FIN */
	__u8 ct_window;		    /* TCP: the window of the last conntrack update */
	__u8 translated; /* 1: has a FLOW_CT_NAT, and is the connection after translation */
	__u8 moves;	 /* to other uplinks */
	__u8 pad;
	__u64 ct;    /* translated: as in struct ct_nat */
	__u64 payer; /* the owners of both endpoints, XOR, because the opener is unknown */
};

/*
 * The flow of kind FLOW_CT_NAT: a connection that the host's own rules translate, as its opener sees it;
 * the key is that of a FLOW_OFFLOAD. conntrack's entry says what it is translated to (conntrack.h). What
 * the table reads is where struct flow has it.
 */
struct ct_nat {
	__u64 owner;	      /* of the opener; if it is outside, of the container that receives */
	struct addr nat_addr; /* whom it reaches: for a service, the backend */
	__u32 last_seen;
	__u16 nat_port;
	enum flow_state state;
	enum flow_flags flags;
	__u64 ct; /* the address of conntrack's entry */
	__u32 pad[2];
	__u16 pad2;
	__u16 created;
	__u32 pad3;
	__u64 payer;
};

/*
 * flow_table: all flows, in buckets of FLOW_WAYS places. flow_buckets: a bucket's lock, and the ids of
 * its flows, which are in few cache lines. A keyed hash of the key chooses the bucket, and another
 * part of the hash is the id. flow_table.h has the rules of replacement and of locking.
 */
#define FLOW_WAYS 16

struct flow_entry {
	struct flow_key key;
	union {
		struct flow flow;
		struct offload offload; /* kind FLOW_OFFLOAD */
		struct ct_nat ct_nat;	/* kind FLOW_CT_NAT */
	};
};

struct flow_bucket {
	__u32 id[FLOW_WAYS]; /* 0: the place is free */
	struct bpf_spin_lock lock;
	__u32 pad;
};

/*
 * tuple_notes: a hint about a tuple (tuple_hint.h). The upper half of the word has a hash of
 * the tuple and the place's epoch, the lower half the hint.
 */
#define TUPLE_HINTS 16384

/*
 * port_marks: a byte for each port and kind of mark. Never cleared. Key: the number divided by 8;
 * UDP's follow after TCP's.
 */
#define PORT_MARK_WORDS 8192 /* of 8 bytes, per kind and protocol */

enum port_mark {
	PORT_REPLIES = 0,	  /* of containers: a remote has opened a flow to it */
	PORT_TRANSLATED = 2,	  /* the host's rules have sent a remote on to a container */
	PORT_FORWARDED = 4,	  /* it is or was a host port's number; only ADD writes it */
	PORT_FORWARDED_EXACT = 6, /* the same, of a host port on one address */
	PORT_MARKS = 8,
};

/* masq_sources: addresses that an uplink has masqueraded with, the latest first. */
#define MASQ_SOURCES 8

struct masq_sources_key {
	__u32 ifindex;
	__u32 ipv6;
};

struct masq_sources {
	struct addr addr[MASQ_SOURCES];
};

/* fragments: the ports of a packet that arrives in fragments. */
struct fragment_key {
	struct addr src;
	struct addr dst;
	__u32 id; /* as in the packet */
	__u8 protocol;
	__u8 pad[3];
};

struct fragment {
	__u16 sport;
	__u16 dport;
	__u8 echo_reply; /* ICMP: a reply, not a request */
	__u8 has_ports;	 /* as in struct packet */
	__u8 queued;	 /* frag_queue has later fragments that are not sent yet */
	__u8 unreadable; /* the first fragment is unreadable: the packet is left to the stack */
	__u32 last_seen; /* the first fragment, or the first one queued; in ticks of 2^30 ns */
};

/* frag_queue: a fragment that arrived before the first one of its packet. */
struct frag_queue_key {
	struct fragment_key fragment;
	__u32 place; /* by its offset, or the next free one */
};

#define FRAG_QUEUE_MAX_LEN 1600 /* bytes of a frame; larger ones are not queued */

struct queued_frag {
	__u32 last_seen; /* in ticks of 2^30 ns */
	__u32 len;
	__u8 frame[FRAG_QUEUE_MAX_LEN];
};

/*
 * prefixes: sets of destinations that are not masqueraded, of clients that may use a host port, and of
 * routes of containers. The value is a route's gateway. All zeros: the host, or the prefix is no route.
 * nodes: the prefixes of the cluster's other nodes; the set is 0.
 * The set comes before the address, so prefixlen is 32 longer than the
 * address's (and another 96 for IPv4).
 */
struct prefix_key {
	__u32 prefixlen;
	__u32 set;
	struct addr addr;
};

/*
 * uplinks: an external interface, and the addresses to masquerade with if the kernel
 * does not report a route's source (before 6.7). Key: ifindex.
 */
struct uplink {
	struct addr addr4; /* all zeros: none */
	struct addr addr6;
	__u32 container_bridge; /* 1: not an uplink but another plugin's bridge, without programs */
	__u32 bridge;		/* 1: an uplink that is a bridge */
};

_Static_assert(sizeof(struct masq_sources_key) == 8, "masq_sources_key");
_Static_assert(sizeof(struct offload) == sizeof(struct flow), "offload");
_Static_assert(sizeof(struct ct_nat) == sizeof(struct flow), "ct_nat");
_Static_assert(sizeof(struct frag_queue_key) == 44, "frag_queue_key");
_Static_assert(sizeof(struct queued_frag) == 8 + FRAG_QUEUE_MAX_LEN, "queued_frag");
