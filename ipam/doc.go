// Package ipam assigns addresses to container interfaces, in process. It reads
// host-local's configuration and uses host-local's files, so a node can switch from
// host-local and back on the same directory, and both can use it at the same time.
//
// # On disk
//
// All state of a network is in <dataDir>/<network name>:
//
//	10.1.0.2, fd00::2      a reservation: the file's name is the address, its
//	                       content is the container id, "\r\n", the interface name
//	last_reserved_ip.<n>   the address that range set n assigned last
//	lock                   locked exclusively by flock to change any of the above
//	.ebpfnet.tmp           a file being written, see below
//
// A reservation is written under the temporary name and then linked to its final name,
// so a crash never leaves half of one. host-local writes in place: a record that a crash
// tore there (an empty file, or one of zeroes) counts as free. The temporary file exists
// only while the lock is held; the next process to take the lock removes what a killed
// one left.
//
// # When an address is assigned again
//
// A reservation lasts until DEL or GC. If its attachment is added again after a reboot,
// it gets the same addresses. When a range set is exhausted, or a requested address is
// taken, a reservation is reclaimed if it is torn, or if it was made before this boot and
// the caller does not report its attachment as alive ([Options]).
//
// The boot is known only from an extended attribute of the file, which holds a boot's id.
// Our reservations have it from the start. host-local's get the id of the running boot
// when all records are read, so they can be reclaimed from the next boot on. A record
// without the attribute is never reclaimed: those on file systems without extended
// attributes, and those of host-local 0.7 and older, which name no interface. No clock is
// involved. As with host-local, the directory belongs to one host.
//
// # Cost
//
// An index in /run, beside the records of attachments, names the reservations of each
// attachment, and can be proved fresh (see the type index). So the cost of ADD, CHECK and
// DEL does not grow with the number of reservations. All of them are read only once after
// a boot, after a change by host-local, and after a process was killed. A long run of
// taken addresses at the start of a range is tried once, and then skipped until one of
// them is released (see the type takenRun).
//
// Nothing is synced to disk, as with host-local: a loss of power ends the containers too,
// and leaves reservations that are torn or of an earlier boot.
//
// # Layers
//
// [Parse] turns JSON into a validated [Config]. RangeSet says in which order its
// addresses are tried, and does no I/O. store reads and writes the directory, and index
// finds an attachment's reservations in it. [Pool] has the operations, one per CNI verb;
// each takes the lock once, and briefly.
//
// The package imports of this module only loader/flock and plugin/show.
package ipam
