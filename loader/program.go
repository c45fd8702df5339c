package loader

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// openProgram opens a pinned program. The caller must close it.
//
// [ebpf.LoadPinnedProgram] also creates a map, to probe for object names, and before
// that reads the list of all mounts for a token. The list grows with the containers on
// a host, so every ADD would become slower.
func openProgram(pin string) (*ebpf.Program, error) {
	fd, err := getPinned(pin)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: pin, Err: err}
	}
	program, err := ebpf.NewProgramFromFD(fd)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", pin, err)
	}
	return program, nil
}

// getPinned is bpf(BPF_OBJ_GET). The kernel sets close-on-exec.
func getPinned(pin string) (fd int, err error) {
	path, err := unix.BytePtrFromString(pin)
	if err != nil {
		return 0, err
	}
	attr := struct {
		pathname uint64
		fd       uint32
		flags    uint32
	}{pathname: uint64(uintptr(unsafe.Pointer(path)))}
	r, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_OBJ_GET, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	runtime.KeepAlive(path)
	if errno != 0 {
		return 0, errno
	}
	return int(r), nil
}
