package ipam

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// bootMark is the extended attribute with the id of a boot in which the record existed:
// ours are marked when they are written, host-local's when we first read them. An
// attribute lives and dies with its file, and host-local ignores it. A record marked with
// another boot has outlived its container. A missing mark proves nothing, and neither
// does any timestamp, since clocks can be set back.
const bootMark = "user.ebpfnet.boot"

const maxMark = 64 // bytes; a longer mark is not ours

const bootIDPath = "/proc/sys/kernel/random/boot_id"

// readBootID returns "" if the id is unreadable: then no record is marked or found dead.
func readBootID() string {
	id, _ := os.ReadFile(bootIDPath)
	return strings.TrimSpace(string(id))
}

// mark marks a new record. If the file system has no user xattrs (tmpfs before Linux
// 6.6) or is full, the record stays unmarked, and is never reclaimed.
func (s *store) mark(file *os.File) {
	if s.boot == "" {
		return
	}
	if err := unix.Fsetxattr(int(file.Fd()), bootMark, []byte(s.boot), 0); err != nil {
		s.log.Debug("cannot mark the reservation with this boot", "path", file.Name(), "error", err)
	}
}

// markUnmarked marks host-local's records.
func (s *store) markUnmarked(r record) {
	if s.boot == "" || s.isShared || r.err != nil {
		return
	}
	_ = unix.Setxattr(r.path, bootMark, []byte(s.boot), unix.XATTR_CREATE)
}

// isDead reports whether r's container ended with an earlier boot. A record of an old
// host-local may belong to any interface of the container, and is never dead.
func (s *store) isDead(r record) bool {
	if r.err != nil || r.holder.IfName == "" || s.boot == "" {
		return false
	}
	mark := make([]byte, maxMark)
	n, err := unix.Getxattr(r.path, bootMark, mark)
	if err != nil || n == 0 || string(mark[:n]) == s.boot {
		return false
	}
	return s.alive == nil || !s.alive(r.holder)
}
