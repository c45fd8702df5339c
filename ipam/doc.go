// Package ipam gives container interfaces their addresses, in process, with
// host-local's configuration and host-local's files, so that a node can change
// over from host-local and back on the same directory.
//
// # On disk
//
// All state of a network is in <dataDir>/<network name>:
//
//	10.1.0.2, fd00::2      a reservation: the file's name is the address, its
//	                       content is the container id, "\r\n", the interface name
//	last_reserved_ip.<n>   the address that range set n gave last
//	lock                   flock'ed exclusively by whoever changes the above
//	.ebpfnet.tmp           a file being written, see below
//
// Each reservation is written and synced under the temporary name and then linked to
// its final name, so that no crash leaves half of one. host-local itself writes in
// place: what a crash tore there (an empty file, a file of zeroes) counts as free. The
// temporary file exists under the lock only; the next to take the lock removes what a
// killed process left.
//
// # Layers
//
// [Parse] turns JSON into a validated [Config]; RangeSet says in which order its
// addresses are tried, and does no I/O; store knows the directory; [Pool] is the
// operations, one per CNI verb, each of which holds the lock once and briefly.
package ipam
