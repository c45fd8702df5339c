/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Everything the programs share with user space: map keys and values, the
 * configuration, and the constants that both sides name.
 *
 * bpf2go generates the Go types from the BTF of these structs. Padding is
 * explicit and zero, because keys are compared as bytes. Ports are in host byte
 * order, so `bpftool map dump` prints them the way people write them; addresses
 * are bytes in network order.
 *
 * Fixed from here on, so that any version can clean up after any other:
 *  - the names of the maps and of the programs;
 *  - the first three members of host_config;
 *  - the owner comes first in every value that has one (in drops: in the key), and
 *    the network follows it in devices, endpoints and host_ports.
 * Any other change of a layout is a change of ABI: raise EBPFNET_ABI.
 */
#pragma once

#include <linux/types.h>

#define EBPFNET_ABI 6

/* An IPv6 address, or an IPv4 address as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2). */
struct addr {
	__u8 bytes[16];
} __attribute__((aligned(4)));

/* How programs are attached to the devices that other tools share. */
enum attach {
	ATTACH_TCX = 1,	   /* BPF links, kernel 6.6 */
	ATTACH_CLSACT = 2, /* tc filters */
};

/* Idle times after which a flow loses its port, in ticks of 2^30 ns. */
struct timeouts {
	__u32 tcp_unreplied;
	__u32 tcp_established; /* both sides have sent */
	__u32 tcp_closing;     /* one side has sent FIN or RST */
	__u32 udp_unreplied;
	__u32 udp_stream; /* both sides have sent */
	__u32 other;	  /* ICMP echo, and protocols without ports */
};

/* What the datapath was loaded with: frozen in .rodata, pinned as maps/config. */
struct host_config {
	__u32 abi; /* EBPFNET_ABI */
	enum attach attach;
	__u64 build;	       /* hash of the programs' code */
	__u32 revision;	       /* newer programs have a higher one */
	__u16 masq_port_first; /* lowest port (and ICMP id) that masquerading allocates */
	__u16 masq_port_count; /* size of the range, 1 to 65535 */
	struct timeouts timeout;
};

enum endpoint_flags {
	ENDPOINT_MASQ = 1, /* masquerade what this address sends to the outside */
};

/* clang-format off */
enum fast_path { /* between two endpoints, the bits that both have apply */
	FAST_PATH_NEVER = 0,
	FAST_PATH_ESTABLISHED = 1, /* established connections bypass the stack */
	FAST_PATH_ALWAYS = 3,      /* and so do new ones */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/* endpoints: a container address on this host. Key: struct addr. */
struct endpoint {
	__u64 owner;	     /* the attachment's token */
	__u32 network;	     /* the network's token */
	__u32 ifindex;	     /* host end of the veth */
	__u8 mac[6];	     /* container end */
	__u8 host_mac[6];    /* host end */
	struct addr gateway; /* the host's address on the veth; hairpin clients appear as it */
	enum endpoint_flags flags;
	__u32 nonmasq_set; /* set of destinations in nonmasq_cidrs, or 0 */
	__u32 container;   /* the container's token: it may have several attachments */
	__u16 mtu;	   /* of the veth */
	enum fast_path fast_path;
	__u8 pad;
	__u32 pad2;
};

enum device_flags {
	DEVICE_ANTI_SPOOF = 1,	/* the container sends from its own MAC and addresses only */
	DEVICE_BRIDGED = 2,	/* behind a bridge: others hear what it sends */
	DEVICE_ANY_ADDRESS = 4, /* has no addresses of its own, may use any that nobody has */
	DEVICE_SHAPED = 8,	/* a queue limits what it receives: nothing may bypass it */
};

/* clang-format off */
/* Which containers of this host may open connections to a container. */
enum policy {
	POLICY_OPEN = 0,
	POLICY_SAME_NETWORK = 1,
	POLICY_ISOLATED = 2, /* none */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/* devices: the host end of a container's veth. Key: ifindex. An address of all zeros: none. */
struct device {
	__u64 owner;
	__u32 network;
	__u32 container;
	struct addr addr4; /* the container's first; endpoints has all of them */
	struct addr addr6;
	struct addr gateway4; /* the host's */
	struct addr gateway6;
	__u8 mac[6]; /* container end */
	enum policy ingress_policy;
	__u8 pad;
	enum device_flags flags;
	__u32 pad2;
};

/* clang-format off */
enum host_port_dir {
	HOST_PORT_FORWARD = 0, /* host address and port to container address and port */
	HOST_PORT_REVERSE = 1, /* the inverse: restores connections whose flow was lost */
} __attribute__((packed)); /* one byte */
/* clang-format on */

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
	__u32 src_range_set; /* set of clients in port_src_ranges, or 0: everyone */
	__u32 pad2;
};

enum flow_kind {
	FLOW_SNAT = 1,	   /* opened by a container and masqueraded; translates its replies */
	FLOW_DNAT = 2,	   /* opened to a container; replies leave from the address asked for */
	FLOW_EGRESS = 3,   /* opened by a container with an ingress policy; admits its replies */
} __attribute__((packed)); /* one byte */

enum flow_state {
	FLOW_REPLIED = 1, /* both sides have sent */
	FLOW_FIN = 2,	  /* TCP: the opener has sent FIN; RST of either side counts as both FINs */
	FLOW_FIN_REPLY = 4, /* TCP: the other side has sent FIN */
	FLOW_RST = 8,	    /* TCP: the last packet was a RST */
} __attribute__((packed));  /* one byte */

/*
 * flows: a translated connection. One entry is all the state of a flow. It
 * translates one direction; the other needs none, or finds it by probing
 * (masq.h). For ICMP echo the identifier stands for the port of the side that
 * sent the request; the port of the other side is 0.
 *
 * An entry is valid as long as its owner has the endpoint. Lookups check that.
 *
 * flows_backup: a copy of the entries of established TCP connections, until both
 * sides have closed. A side that only listens could not restore a lost entry.
 */
struct flow_key {
	struct addr remote; /* the side that is not this entry's endpoint */
	struct addr local;  /* FLOW_SNAT: our masquerading address; else the container's */
	__u16 remote_port;
	__u16 local_port;
	__u8 protocol;
	enum flow_kind kind;
	__u16 pad;
};

#define OWNER_HOST 0 /* the host itself */

struct flow {
	__u64 owner;
	/* FLOW_SNAT: the container's; FLOW_DNAT: the one the client used; FLOW_EGRESS: 0 */
	struct addr nat_addr;
	__u32 last_seen; /* in ticks of 2^30 ns since boot */
	__u16 nat_port;
	enum flow_state state; /* bits */
	__u8 pad;
};

#define MASQ_PROBES	  32   /* candidate ports of a flow, masq.h */
#define MASQ_PROBE_GROUPS 1024 /* pairs of container and remote are hashed into these */

/*
 * masq_probes: which candidates a group's flows have ever probed. They are always
 * the first ones, and the very first is not recorded. Lookups stop behind them.
 */
struct masq_probes {
	__u8 used[MASQ_PROBES];
};

/* offload_tcp, offload_udp: a connection of an endpoint. Its sides are sorted (offload.h). */
struct offload_key {
	struct addr addr[2];
	__u16 port[2];
	__u8 protocol;
	__u8 pad[3];
};

/* clang-format off */
enum offload_state { /* of side 0; shift left by one for side 1 */
	OFFLOAD_DELIVERED = 1, /* the stack has delivered a packet of this side unchanged */
	OFFLOAD_SYN = 4,       /* this side has sent SYN since */
	OFFLOAD_FIN = 16,      /* this side has sent FIN */
	OFFLOAD_FIN_ACK = 64,  /* and the other side has acknowledged it */
} __attribute__((packed)); /* one byte */
/* clang-format on */

struct offload {
	__u64 owners;		  /* of the endpoints at both sides, XOR */
	__u32 uplink;		  /* ifindex towards the side that is no endpoint, or 0 */
	__u32 ct_seen;		  /* when conntrack last saw the connection, in ticks of 2^30 ns */
	__u32 ct_seq[2];	  /* TCP: a sequence number of each side that conntrack has seen */
	__u32 fin_seq[2];	  /* TCP: the sequence number behind each side's FIN */
	enum offload_state state; /* bits */
	__u8 pad[7];
};

/* fwd_cache: where the last packet like this one went. The key is the head of struct packet. */
struct fwd_key {
	struct addr src;
	struct addr dst;
	__u16 sport;
	__u16 dport;
	__u32 ifindex; /* ingress */
	__u8 protocol;
	__u8 ipv6;
	__u8 has_ports;
	__u8 echo_reply;
};

struct fwd_entry {
	__u32 updated;	      /* in jiffies */
	__u32 ifindex;	      /* egress */
	__u32 max_len;	      /* largest IP packet known to fit, in bytes */
	__u32 family;	      /* of the next hop; 0: the device is a container's */
	struct addr next_hop; /* or, for a container, the frame's MAC addresses */
	struct addr nat_addr;
	__u16 nat_port;
	__u8 nat_side; /* enum side: which side of the packet to translate */
	__u8 nat;      /* 0: nothing to translate */
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
	__u8 queued;	 /* later fragments are in frag_queue and not sent yet */
	__u8 unreadable; /* first fragment unreadable: leave the datagram to the stack */
	__u32 last_seen; /* the first fragment, or the first one queued; in ticks of 2^30 ns */
};

/* frag_queue: a fragment that arrived before the first one of its packet. */
struct frag_queue_key {
	struct fragment_key fragment;
	__u32 offset; /* in the packet, in units of 8 bytes */
};

#define FRAG_QUEUE_MAX_LEN 1600 /* bytes of a frame; larger ones are not queued */

struct queued_frag {
	__u32 last_seen; /* in ticks of 2^30 ns */
	__u32 len;
	__u8 frame[FRAG_QUEUE_MAX_LEN];
};

/*
 * nonmasq_cidrs: sets of destinations that are not masqueraded.
 * port_src_ranges: sets of clients that may use a host port.
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
	__u32 container_bridge; /* 1: no uplink but another plugin's bridge, without programs */
};

/*
 * drop_totals: dropped packets by reason. Key: enum reason.
 * drops: the same for one attachment.
 */
struct drop_count {
	__u64 packets;
	__u64 bytes;
};

enum reason {
	REASON_NO_SOURCE = 0,	 /* the uplink has no address to masquerade with */
	REASON_NO_PORT = 1,	 /* every candidate port for this remote is taken */
	REASON_FRAGMENT = 2,	 /* a fragment without its first one */
	REASON_PROTOCOL = 3,	 /* cannot be masqueraded */
	REASON_TRUNCATED = 4,	 /* shorter than its headers say */
	REASON_REWRITE = 5,	 /* the kernel refused to change the packet, or had no memory */
	REASON_NO_FLOW = 6,	 /* of a translated connection that is no longer known */
	REASON_MAC = 7,		 /* antiSpoof: source MAC is not the container's */
	REASON_ADDRESS = 8,	 /* antiSpoof: source address is not the container's */
	REASON_GATEWAY = 9,	 /* antiSpoof: source address is the gateway's */
	REASON_ARP = 10,	 /* antiSpoof: ARP for another address */
	REASON_NEIGHBOR = 11,	 /* antiSpoof: neighbor discovery for another address */
	REASON_ROUTER = 12,	 /* antiSpoof: router advertisement or redirect */
	REASON_DHCP_SERVER = 13, /* antiSpoof: DHCP server message */
	REASON_HEADERS = 14,	 /* antiSpoof: headers that hide the one behind them */
	REASON_POLICY = 15,	 /* from a container that ingressPolicy does not admit */
	REASON_SRC_RANGE = 16,	 /* to a host port whose source ranges exclude the client */
	REASON_MAX = 17,
};

struct drop_key {
	__u64 owner;
	enum reason reason;
	__u32 pad;
};

_Static_assert(sizeof(struct host_config) == 48, "host_config");
_Static_assert(sizeof(struct endpoint) == 64, "endpoint");
_Static_assert(sizeof(struct device) == 96, "device");
_Static_assert(sizeof(struct drop_key) == 16, "drop_key");
_Static_assert(sizeof(struct host_port_key) == 20, "host_port_key");
_Static_assert(sizeof(struct host_port) == 40, "host_port");
_Static_assert(sizeof(struct flow_key) == 40, "flow_key");
_Static_assert(sizeof(struct flow) == 32, "flow");
_Static_assert(sizeof(struct masq_probes) == MASQ_PROBES, "masq_probes");
_Static_assert(sizeof(struct offload_key) == 40, "offload_key");
_Static_assert(sizeof(struct offload) == 40, "offload");
_Static_assert(sizeof(struct fwd_key) == 44, "fwd_key");
_Static_assert(sizeof(struct fwd_entry) == 52, "fwd_entry");
_Static_assert(sizeof(struct fragment_key) == 40, "fragment_key");
_Static_assert(sizeof(struct fragment) == 12, "fragment");
_Static_assert(sizeof(struct frag_queue_key) == 44, "frag_queue_key");
_Static_assert(sizeof(struct queued_frag) == 8 + FRAG_QUEUE_MAX_LEN, "queued_frag");
_Static_assert(sizeof(struct prefix_key) == 24, "prefix_key");
_Static_assert(sizeof(struct uplink) == 36, "uplink");
_Static_assert(sizeof(struct drop_count) == 16, "drop_count");
