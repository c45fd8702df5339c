// Package plugin is the CNI plugin: one file per verb (add.go, del.go, check.go, status.go, gc.go),
// each a list of steps over the packages below it.
//
// A call is one short-lived process. Its state is in the kernel (devices, pinned maps and links) and on
// disk (reservations of addresses, records). Later calls find it by the attachment: network, container
// ID and interface name.
//
// # Packages
//
// Imports go down this list only: imports_test.go lists what each package may import.
//
//	cmd/*             the commands; the IPAM plugin is in its command, and what ebpfnetctl's commands
//	                  share is below it; cmd/ebpfnet-node is a module of its own, with a list of packages in its doc.go
//	plugin            the verbs
//	plugin/metrics    the datapath's figures for Prometheus
//	plugin/drops      dropped packets, one by one
//	plugin/containers the names that runtimes give containers
//	plugin/admin      what ebpfnetctl reads and changes: attachments, flows, traffic, set, repair, unload
//	plugin/runtimes   how the runtimes of the host use CNI: their directories and lists
//	plugin/refresh    follows changes of the host, for the verbs and for ebpfnetctl
//	plugin/cni        runs verbs: log, deadline, results and errors
//	plugin/config     parses what a runtime sends; no side effects
//	plugin/policy     parses and compiles policies
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
//     holds it exclusively while it removes what is not a device. An ADD in progress
//     has addresses and no device yet, which would look like a dead container. ADDs run in
//     parallel. If the directory cannot be created, there is no lock.
//  2. The lock file of a network's reservations (package ipam). ADD, DEL and GC hold it exclusively
//     while they change reservations, CHECK and STATUS shared while they read them.
//  3. The root of the pins ([loader.Root]), the datapath's lock: exclusive for whoever loads,
//     upgrades or unloads the datapath, writes map entries (maps.With) or attaches to shared
//     devices. ADD, DEL, STATUS, GC and ebpfnetctl take it for each such change.
//
// Only `ebpfnetctl repair --hook` takes the lock of loader.TakeTurn, before all others. `ebpfnetctl
// drops --follow` holds a lock that nothing waits for (loader.TryDropReader).
//
// Nobody holds 2 and 3 at the same time. Each is taken for one change and released before the next
// step, so no order between them can deadlock. Reads of the datapath take no lock. A verb that
// does not get a lock in time returns the code of "try again later" (flock.ErrBusy).
//
// Package plugin may import what is below plugin/admin in this list, but not bpf.
package plugin
