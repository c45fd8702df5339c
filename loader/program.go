package loader

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
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

type programNamer func(ebpf.ProgramID) (string, error)

// pinnedPrograms are the names of pinned programs.
type pinnedPrograms map[ebpf.ProgramID]string

// pinnedPrograms returns the programs of all builds whose names match the pattern.
func (d stateDir) pinnedPrograms(pattern string) (pinnedPrograms, error) {
	pins, err := filepath.Glob(filepath.Join(d.progs(), "*", pattern))
	if err != nil {
		return nil, err
	}
	names := pinnedPrograms{}
	for _, pin := range pins {
		name := filepath.Base(pin)
		if strings.HasPrefix(name, tempMap) {
			continue
		}
		id, err := pinnedID(pin)
		if errors.Is(err, fs.ErrNotExist) {
			continue // an upgrade has just removed it
		}
		if err != nil {
			return nil, err
		}
		names[id] = name
	}
	return names, nil
}

func pinnedID(pin string) (ebpf.ProgramID, error) {
	program, err := openProgram(pin)
	if err != nil {
		return 0, err
	}
	defer program.Close()
	info, err := program.Info()
	if err != nil {
		return 0, fmt.Errorf("get the ID of %s: %w", pin, err)
	}
	id, _ := info.ID()
	return id, nil
}

// name asks the kernel only for programs that are not pinned, because that needs CAP_SYS_ADMIN, which the node agent does not have.
func (p pinnedPrograms) name(id ebpf.ProgramID) (string, error) {
	if name, isPinned := p[id]; isPinned {
		return name, nil
	}
	return ProgramName(id)
}
