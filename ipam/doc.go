// Package ipam gives container interfaces their addresses, in process, with
// host-local's configuration and host-local's files, so that a node can change
// over from host-local and back on the same directory, and both can work on it
// at the same time.
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
// # Whose address is given again
//
// A reservation stands until DEL or GC, or until its own attachment is added again after
// a reboot, which then has the same addresses. Only instead of saying that a range set is
// exhausted, or that a requested address is taken, one address is taken over: from a torn
// reservation, or from one that stood in an earlier boot already and whose attachment the
// caller does not know to live ([Host]).
//
// That it stood in an earlier boot is told by a mark alone, an extended attribute with a
// boot's id. Our reservations have it from the start. Those of host-local get that of the
// running boot when all records are read, and so can be taken over from the next boot
// on; without a mark they stay. So do those of host-local 0.7 and older, which name
// no interface, and all on file systems that cannot keep marks. No clock is asked. The
// directory belongs to one host, as with host-local.
//
// # Cost
//
// An index, beside the records of attachments in /run, tells where the reservations of an
// attachment are, and can be proved to be fresh (see the type index). So what ADD,
// CHECK and DEL cost does not grow with the reservations. All of these are read once after a
// boot, after a change by host-local, and after a process that was killed. ADD and DEL
// together, each a process, on tmpfs and 2 busy processors (BenchmarkAllocation in
// test/conformance):
//
//	reservations      1   1,000   10,000    65,000
//	ebpfnet-ipam   8 ms    8 ms     8 ms     12 ms
//	host-local     7 ms   19 ms   184 ms  1,422 ms
//
// In process it is 0.1 ms beside any number of reservations. A long row of taken addresses at
// the start of a range is tried once, at 1 to 2 µs for each, and then passed over until one
// of them is released (see the type row). Nothing is synced to a disk, as with host-local: a
// loss of power ends the containers too, and what it leaves of their reservations is torn or
// of an earlier boot.
//
// # Layers
//
// [Parse] turns JSON into a validated [Config]; RangeSet says in which order its
// addresses are tried, and does no I/O; store knows the directory, index where in it an
// attachment's reservations are; [Pool] is the operations, one per CNI verb, each of which
// holds the lock once and briefly.
package ipam
