/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Everything that the programs share with user space: keys and values of the
 * maps, switches, and the numbers that both sides name.
 *
 * bpf2go makes the Go twins from the BTF of these structs. Padding is explicit
 * and zero, because keys are compared as bytes. Ports are in host byte order,
 * so that `bpftool map dump` prints them as people write them; addresses are
 * bytes in network order. A change of any layout here is a change of ABI:
 * raise EBPFNET_ABI. What never changes, so that any version can clean up after
 * any other: the names of the maps, the first three members of host_config, and
 * that an owner's value (of drops: the key) begins with the owner, and then, in
 * devices, endpoints and ports, the network.
 */
#pragma once

#include <linux/types.h>

#define EBPFNET_ABI 5

/* An IPv6 address, or an IPv4 one as ::ffff:a.b.c.d (RFC 4291, 2.5.5.2). */
struct addr {
	__u8 bytes[16];
} __attribute__((aligned(4)));

/* How programs are attached to devices on this host. */
enum attach {
	ATTACH_TCX = 1,	   /* BPF links, kernel 6.6 */
	ATTACH_CLSACT = 2, /* tc filters */
};

/* Times after which an idle flow has no right to its port any more, in ticks of 2^30 ns. */
struct timeouts {
	__u32 tcp_opening; /* one side has sent */
	__u32 tcp_open;	   /* both have */
	__u32 tcp_closing; /* one side has sent FIN or RST */
	__u32 udp_opening;
	__u32 udp_open;
	__u32 other; /* ICMP echo, and protocols without ports */
};

/* What the datapath was loaded with; frozen in .rodata, pinned as maps/config. */
struct host_config {
	__u32 abi; /* EBPFNET_ABI */
	enum attach attach;
	__u64 build;	       /* what programs these are: a hash of their code */
	__u32 revision;	       /* newer programs have a higher one */
	__u16 masq_port_first; /* lowest port (and ICMP id) that masquerading chooses */
	__u16 masq_port_count; /* how many from there on, 1 to 65535 */
	struct timeouts timeout;
};

enum endpoint_flags {
	ENDPOINT_MASQ = 1, /* masquerade what this address sends to the outside */
};

/* clang-format off */
enum fast_path { /* of two endpoints, the bits that both have */
	FAST_NEVER = 0,
	FAST_ESTABLISHED = 1, /* connections that the stack has let pass go past it */
	FAST_ALWAYS = 3,      /* new ones too */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/* endpoints: a container address on this host. Key: struct addr. */
struct endpoint {
	__u64 owner;	     /* the attachment's token */
	__u32 network;	     /* the network's token */
	__u32 ifindex;	     /* the host's end of the veth */
	__u8 mac[6];	     /* of the container's end */
	__u8 host_mac[6];    /* of the host's end */
	struct addr gateway; /* the host's address on the veth: whom the container answers */
	enum endpoint_flags flags;
	__u32 exempt;	 /* set of destinations in exempts, or 0 */
	__u32 container; /* the container's token: it may have several attachments */
	__u16 mtu;	 /* of the veth */
	enum fast_path fast;
	__u8 pad;
	__u32 pad2;
};

enum device_flags {
	DEVICE_ANTI_SPOOF = 1,	/* the container sends from its own MAC and addresses only */
	DEVICE_SHARED = 2,	/* others hear what it sends: it is behind a bridge */
	DEVICE_ANY_ADDRESS = 4, /* it was given no addresses, and may use those that nobody has */
	DEVICE_SHAPED = 8, /* a queue on it holds what it is sent to a rate: nothing goes past it */
};

/* clang-format off */
/* From which containers of this host a container takes more than replies. */
enum policy {
	POLICY_OPEN = 0,
	POLICY_SAME_NETWORK = 1,
	POLICY_ISOLATED = 2, /* from none */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/* devices: the host's end of a container's veth. Key: ifindex. All zero: no such address. */
struct device {
	__u64 owner;
	__u32 network;
	__u32 container;
	struct addr addr4; /* the container's first; all of them are in endpoints */
	struct addr addr6;
	struct addr gateway4; /* the host's */
	struct addr gateway6;
	__u8 mac[6]; /* of the container's end */
	enum policy ingress;
	__u8 pad;
	enum device_flags flags;
	__u32 pad2;
};

/* clang-format off */
enum port_side {
	PORT_HOST = 0,	    /* the key is the host's side, the value the container's */
	PORT_CONTAINER = 1, /* the other way round: serves connections whose flow was lost */
} __attribute__((packed)); /* one byte */
/* clang-format on */

/*
 * ports: a port of the host that leads to a container. The host's address is
 * one of its own, or any: 0.0.0.0 (mapped) for IPv4, :: for IPv6.
 */
struct port_key {
	struct addr addr;
	__u16 port;
	__u8 protocol; /* IPPROTO_TCP or IPPROTO_UDP */
	enum port_side side;
};

struct port {
	__u64 owner;
	__u32 network;
	__u16 port;
	__u16 pad;
	struct addr addr;
	__u32 sources; /* set of clients in sources that it is for, or 0: for all */
	__u32 pad2;
};

enum flow_kind {
	FLOW_OUT = 1, /* opened by a container and masqueraded; translates replies to it */
	FLOW_IN = 2,  /* opened towards a container; gives its replies the address asked for */
	FLOW_OPENED =
		3, /* opened by a container with an ingress policy, which lets the replies in */
} __attribute__((packed)); /* one byte */

enum flow_state {
	FLOW_REPLIED = 1,   /* both sides have sent */
	FLOW_FIN = 2,	    /* TCP: who opened it has sent FIN; RST of either side counts as both */
	FLOW_FIN_REPLY = 4, /* TCP: the other side has */
	FLOW_RST = 8,	    /* TCP: the last packet was a RST */
} __attribute__((packed));  /* one byte */

/*
 * flows: a translated connection. An entry is the only state of its flow, and
 * translates one direction; the other direction needs none, or finds it by
 * probing (masq.h). For ICMP echo the identifier stands for the port of the
 * side that sent the request, the other side's port is 0.
 *
 * An entry holds as long as its owner has the endpoint: who finds one looks there, too.
 *
 * established: the same once more, for TCP connections whose both sides have sent
 * and not both have ended. Whoever only listens has nothing to bring a lost
 * entry back with.
 */
struct flow_key {
	struct addr remote; /* the side that is no endpoint of this entry */
	struct addr local;  /* FLOW_OUT: our masquerading address; else: the container's */
	__u16 remote_port;
	__u16 local_port;
	__u8 protocol;
	enum flow_kind kind;
	__u16 pad;
};

#define OWNER_HOST 0 /* the host itself */

struct flow {
	__u64 owner;
	struct addr
		addr; /* FLOW_OUT: the container's; FLOW_IN: what the client used; FLOW_OPENED: 0 */
	__u32 seen;   /* time of the last packet, in ticks of 2^30 ns since boot */
	__u16 port;   /* belongs to addr */
	enum flow_state state; /* bits */
	__u8 pad;
};

#define MASQ_PROBES  32	  /* candidates that a flow has, masq.h */
#define MASQ_REMOTES 1024 /* groups that all pairs of container and remote are put into */

/*
 * tried: which candidates flows of such a group have ever tried; always the first ones, and
 * the very first is not noted. A flow need not be looked for behind those.
 */
struct tried {
	__u8 candidate[MASQ_PROBES];
};

/* offload_tcp, offload_udp: a connection of an endpoint. Its sides stand in an order of their own. */
struct offload_key {
	struct addr addr[2];
	__u16 port[2];
	__u8 protocol;
	__u8 pad[3];
};

/* clang-format off */
enum offload_state { /* of side 0; those of side 1 are one to the left */
	OFFLOAD_DELIVERED = 1, /* the stack has brought a packet of this side to the other, as it was sent */
	OFFLOAD_SYN = 4,       /* and one that opens a connection anew */
	OFFLOAD_FIN = 16,      /* this side has ended */
	OFFLOAD_FIN_ACK = 64,  /* and the other has acknowledged that */
} __attribute__((packed)); /* one byte */
/* clang-format on */

struct offload {
	__u64 owners;	/* of the endpoints at both sides, XOR */
	__u32 uplink;	/* the device to the side that is no endpoint, or 0 */
	__u32 seen;	/* when the stack has last seen the connection, in ticks of 2^30 ns */
	__u32 first[2]; /* TCP: a sequence number of each side that the stack has seen */
	__u32 end[2];	/* TCP: the one after a side's FIN */
	enum offload_state state; /* bits */
	__u8 pad[7];
};

/* ways: where a packet went that was like the one at hand. The begin of struct packet. */
struct way_key {
	struct addr src;
	struct addr dst;
	__u16 sport;
	__u16 dport;
	__u32 ifindex; /* by which it came in */
	__u8 protocol;
	__u8 ipv6;
	__u8 pad[2];
};

struct way {
	__u32 kept; /* when, in jiffies */
	__u32 ifindex;
	__u32 most;	  /* bytes of a segment that fit */
	__u32 family;	  /* of the next hop; 0: the device is a container's */
	struct addr next; /* the next hop, or the addresses of the frame */
	struct addr addr; /* what the packet gets */
	__u16 port;	  /* of that side */
	__u8 side;	  /* enum side, as what */
	__u8 translated;
};

/* fragments: the ports of a packet that comes in fragments. */
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
	__u8 ported;	 /* there are ports, as struct packet has it */
	__u8 waiting;	 /* later ones are held, and not sent again yet */
	__u8 opaque;	 /* the first could not be read: none of the packet is ours */
	__u32 seen;	 /* the first, or that one waits; in ticks, as struct flow has it */
};

/* held_fragments: a fragment that came before the first of its packet. */
struct held_key {
	struct fragment_key fragment;
	__u32 offset; /* in the packet, in units of 8 bytes */
};

#define HELD_MOST 1600 /* bytes of a frame; larger ones are not held */

struct held {
	__u32 seen; /* in ticks, as struct flow has it */
	__u32 length;
	__u8 frame[HELD_MOST];
};

/*
 * exempts: a set of destinations that are not masqueraded.
 * sources: a set of clients that a host port is for. The bits of set go
 * before those of the address, so the prefix is 32 longer than the address's
 * (and another 96 for IPv4).
 */
struct prefix_key {
	__u32 prefix;
	__u32 set;
	struct addr addr;
};

/*
 * uplinks: a device facing out, with the addresses to masquerade with where the
 * kernel cannot name one for a route (before 6.7). Key: ifindex.
 */
struct uplink {
	struct addr addr4; /* all zero: none */
	struct addr addr6;
	__u32 containers; /* 1: no uplink, but a bridge that containers are behind; no program is on it */
};

/*
 * counters: one per reason for which a packet was dropped. Key: enum reason.
 * drops: the same of one attachment.
 */
struct counter {
	__u64 packets;
	__u64 bytes;
};

enum reason {
	REASON_NO_SOURCE = 0,	 /* the uplink has no address to masquerade with */
	REASON_NO_PORT = 1,	 /* every port for this remote is taken */
	REASON_FRAGMENT = 2,	 /* a fragment, whose ports are not known */
	REASON_PROTOCOL = 3,	 /* a protocol that masquerading cannot tell apart */
	REASON_TRUNCATED = 4,	 /* shorter than its headers say */
	REASON_NOT_WRITTEN = 5,	 /* the kernel refused to change the packet, or had no memory */
	REASON_NO_FLOW = 6,	 /* belongs to a translated connection that is not known any more */
	REASON_MAC = 7,		 /* antiSpoof: from another MAC address than the container's */
	REASON_ADDRESS = 8,	 /* from another address */
	REASON_GATEWAY = 9,	 /* from the host's address on the veth */
	REASON_ARP = 10,	 /* ARP that speaks for another address */
	REASON_NEIGHBOR = 11,	 /* neighbour discovery likewise */
	REASON_ROUTER = 12,	 /* a router's advertisement, or redirect */
	REASON_DHCP_SERVER = 13, /* to a DHCP client */
	REASON_HEADERS = 14,	 /* headers behind which nothing can be seen */
	REASON_POLICY = 15,	 /* from a container that ingressPolicy keeps out */
	REASON_CLIENT = 16,	 /* to a host port that is not for this client */
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
_Static_assert(sizeof(struct port_key) == 20, "port_key");
_Static_assert(sizeof(struct port) == 40, "port");
_Static_assert(sizeof(struct flow_key) == 40, "flow_key");
_Static_assert(sizeof(struct flow) == 32, "flow");
_Static_assert(sizeof(struct tried) == MASQ_PROBES, "tried");
_Static_assert(sizeof(struct offload_key) == 40, "offload_key");
_Static_assert(sizeof(struct offload) == 40, "offload");
_Static_assert(sizeof(struct way_key) == 44, "way_key");
_Static_assert(sizeof(struct way) == 52, "way");
_Static_assert(sizeof(struct fragment_key) == 40, "fragment_key");
_Static_assert(sizeof(struct fragment) == 12, "fragment");
_Static_assert(sizeof(struct held_key) == 44, "held_key");
_Static_assert(sizeof(struct held) == 8 + HELD_MOST, "held");
_Static_assert(sizeof(struct prefix_key) == 24, "prefix_key");
_Static_assert(sizeof(struct uplink) == 36, "uplink");
_Static_assert(sizeof(struct counter) == 16, "counter");
