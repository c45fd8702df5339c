package scenario

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// kernelObjects are the IDs of the kernel's BPF objects. IDs grow with every object, so the newest one
// shows whether anything was created meanwhile, even if it is gone.
type kernelObjects struct {
	programs, maps           []uint32
	newestProgram, newestMap uint32
}

// On a loaded node ADD creates no BPF object, and DEL removes none. Other processes may use BPF as well, so
// one undisturbed attempt is enough: an object of ADD's or DEL's own would show in all of them.
func TestAddLoadsNothing(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "first", mapBoth(8080, 80))
	pod := n.NewPod(t, "second")
	pod.Conf.CapabilityArgs = mapBoth(8081, 80)
	defer del(t, pod)
	raiseMemlock(t)
	listObjects(t) // the library probes the kernel before the first program of a process

	err := testenv.Wait(testenv.Context(t), "an ADD and a DEL that create and remove no BPF object", func() error {
		before := listObjects(t)
		if err := pod.Add(testenv.Context(t)); err != nil {
			t.Fatal(err)
		}
		added := listObjects(t)
		del(t, pod)
		deleted := listObjects(t)
		return errors.Join(before.compare("ADD", added), added.compare("DEL", deleted))
	})
	if err != nil {
		t.Error(err)
	}
}

// probeMaps is the number of maps that the library creates to probe for map names, when it opens a pinned
// program.
const probeMaps = 1

func (before kernelObjects) compare(verb string, after kernelObjects) error {
	var errs []error
	for _, kind := range []struct {
		name                      string
		before, after             []uint32
		newestBefore, newestAfter uint32
		tolerated                 int
	}{
		{"programs", before.programs, after.programs, before.newestProgram, after.newestProgram, 0},
		{"maps", before.maps, after.maps, before.newestMap, after.newestMap, probeMaps},
	} {
		if !slices.Equal(kind.before, kind.after) {
			errs = append(errs, fmt.Errorf("%s after %s: got %v, want %v", kind.name, verb, kind.after, kind.before))
		}
		if made := int(kind.newestAfter-kind.newestBefore) - 1; made > kind.tolerated { // this test created one
			errs = append(errs, fmt.Errorf("%s created %d %s, want at most %d", verb, made, kind.name, kind.tolerated))
		}
	}
	return errors.Join(errs...)
}

// raiseMemlock is needed before 5.11, where maps count against the limit of locked memory. The end of the
// test restores it for plugins, which have to raise it themselves.
func raiseMemlock(t *testing.T) {
	t.Helper()
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	unlimited := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unlimited); err != nil {
		return // newer kernels do not need it
	}
	t.Cleanup(func() {
		if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
			t.Error(err)
		}
	})
}

func listObjects(t *testing.T) kernelObjects {
	t.Helper()
	return kernelObjects{
		programs:      listIDs(t, ebpf.ProgramGetNextID),
		maps:          listIDs(t, ebpf.MapGetNextID),
		newestProgram: nextProgram(t),
		newestMap:     nextMap(t),
	}
}

func listIDs[ID ~uint32](t *testing.T, next func(ID) (ID, error)) (ids []uint32) {
	t.Helper()
	var id ID
	for {
		var err error
		if id, err = next(id); errors.Is(err, os.ErrNotExist) {
			return ids
		} else if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, uint32(id))
	}
}

// nextProgram creates a program and returns its ID.
func nextProgram(t *testing.T) uint32 {
	t.Helper()
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.SocketFilter, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	return uint32(programID(t, program))
}

func programID(t *testing.T, program *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := program.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return id
}

// nextMap is nextProgram for maps.
func nextMap(t *testing.T) uint32 {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, _ := info.ID()
	return uint32(id)
}
