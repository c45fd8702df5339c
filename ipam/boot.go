package ipam

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// A record is marked with a boot in which it stood: ours as we write them, those of
// host-local when we come across them. The mark is an extended attribute of the file, so
// that it comes and goes with the record, and host-local never sees it. A record with the
// mark of another boot than this one has outlived its container. Nothing is concluded
// from the absence of a mark, nor from any time, since clocks go back.
const bootMark = "user.ebpfnet.boot"

const mostMark = 64 // that of nobody else is longer

const bootIDPath = "/proc/sys/kernel/random/boot_id"

// readBootID returns "" where it cannot be known: then no record is marked or found dead.
func readBootID() string {
	id, err := os.ReadFile(bootIDPath)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(id))
}

// mark does without on file systems that cannot (tmpfs before Linux 6.6), or that are full: a record
// without mark is kept.
func (s *store) mark(file *os.File) {
	if s.boot == "" {
		return
	}
	if err := unix.Fsetxattr(int(file.Fd()), bootMark, []byte(s.boot), 0); err != nil {
		s.log.Debug("reservation gets no mark of this boot", "path", file.Name(), "err", err)
	}
}

// markUnmarked is for what host-local has written.
func (s *store) markUnmarked(r record) {
	if s.boot == "" || s.isShared || r.err != nil {
		return
	}
	_ = unix.Setxattr(r.path, bootMark, []byte(s.boot), unix.XATTR_CREATE)
}

// isDead says that r's container went with an earlier boot. What an old host-local wrote
// could be any interface of the container, and is never dead.
func (s *store) isDead(r record) bool {
	if r.err != nil || r.holder.IfName == "" || s.boot == "" {
		return false
	}
	mark := make([]byte, mostMark)
	n, err := unix.Getxattr(r.path, bootMark, mark)
	if err != nil || n == 0 || string(mark[:n]) == s.boot {
		return false
	}
	return s.lives == nil || !s.lives(r.holder)
}
