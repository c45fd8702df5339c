// Package plugin is the CNI plugin: one file per verb (add.go, del.go, check.go, status.go, gc.go),
// each a list of steps over the packages below it.
//
// A call is one short-lived process. It remembers nothing but what is in the kernel (devices, pinned
// maps and links) and on disk (reservations of addresses, records). All of it is found again by the
// attachment: network, container id and interface name.
//
// # Rooms
//
// Imports go down this list only; imports_test.go enforces it, and each package's comment says what
// it may import.
//
//	cmd/*             the commands; the IPAM plugin is in its command, and what ebpfnetctl's commands
//	                  share is below it; cmd/ebpfnet-node is a module of its own, with rooms in its doc.go
//	plugin            the verbs
//	plugin/operator   what ebpfnetctl does: attachments, flows, traffic, set, repair, unload
//	plugin/reconcile  follows changes of the host, for the verbs and for the operator
//	plugin/cni        runs verbs: log, deadline, results and errors
//	plugin/config     parses what a runtime sends; no side effects
//	plugin/record     records of attachments on disk
//	plugin/namespace  netlink and the connections of a container
//	plugin/names      names of devices, aliases and MAC addresses
//	plugin/cnierr     errors with the codes of the specification
//	plugin/nodestate  what the node agent of a cluster leaves for the plugin and for operators
//	plugin/link       devices, addresses, routes, queues and sysctls
//	ipam              allocates addresses
//	maps              entries of the datapath's maps
//	loader            loads, pins, attaches and upgrades the datapath
//	loader/flock      locks between processes
//	loader/rtnl       lists of routing netlink, asked for again where a change interrupts them; many
//	                  devices deleted at once; routes to other nodes
//	bpf               the programs
//	plugin/version    the release
//	plugin/show       text from outside, fit for terminals and logs
//
// # Locks
//
// There are three kinds, all of them flocks, taken in this order:
//
//  1. The directory of records (dataDir). ADD holds it shared from its first step to its last; GC
//     holds it exclusively while it removes what is not a device. So GC never takes an ADD under
//     way, which has addresses and no device yet, for a container that is gone. ADDs run in
//     parallel. Where the directory cannot be created, both go without.
//  2. The lock file of a network's reservations (package ipam). ADD, DEL and GC hold it exclusively
//     while they change reservations, CHECK and STATUS shared while they read them.
//  3. The root of the pins ([loader.Root]), the datapath's lock: exclusive for whoever loads,
//     upgrades or unloads the datapath, writes map entries (maps.With) or attaches to shared
//     devices. ADD, DEL, STATUS, GC and ebpfnetctl take it for each such change.
//
// Before all of them, `ebpfnetctl repair --hook` takes its turn (loader.TakeTurn), which nothing else
// waits for. `ebpfnetctl drops --follow` holds a lock that nobody waits for (loader.TryDropReader).
//
// Nobody holds 2 and 3 at the same time. Each is taken for one change and released before the next
// step, so no order between them can deadlock. Reads of the datapath take no lock. A verb that
// waits in vain for a lock returns the code of "try again later" (flock.ErrBusy).
//
// Package plugin may import what is below plugin/operator in this list, but not bpf.
package plugin
