package prog

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// fastPath auto acts as always, because the node's stack has no hooks; as established if the kernel does not show them.
func TestFastPathAuto(t *testing.T) {
	h := newHost(t)
	shown := uint32(0)
	if testenv.VisibleHooks.Probe() == nil {
		shown = 1
	}
	for name, sees := range map[string]uint32{"this kernel": shown, "hooks not shown": 0} {
		old := *h
		h := &old
		h.programs = withHooksShown(t, h.programs, sees)
		for program, rows := range map[string][]fastPathRow{
			bpf.ProgFromContainer: autoRows(sees == 1, between, between),
			bpf.ProgFromUplink:    autoRows(sees == 1, "remote:5000 > pod:80", "remote:5000 > pod:80"),
		} {
			for _, r := range rows {
				t.Run(name+"/"+program+"/"+r.name, func(t *testing.T) {
					eachScene(t, withPorts, func(t *testing.T, s scene) {
						if r.flags != 0 && s.proto != tcp {
							return
						}
						testenv.NoError(t, h.checkFastPath(program, s, r))
					})
				})
			}
		}
		want := uint32(bpf.HookUnknown)
		if sees == 1 {
			want = 0
		}
		for _, s := range (row{on: []proto{udp}}).scenes() {
			packet := s.packet(between, false)
			if found, _, err := h.runInside(bpf.ProgStackHooks, packet.MustBuild()); err != nil || found != want {
				t.Errorf("%s, %s: stack_hooks returns %d, %v, want %d", name, s.name, found, err, want)
			}
		}
	}
}

func autoRows(asAlways bool, in, out string) []fastPathRow {
	known := podToPod
	if in != between {
		known = outsideToPod
	}
	fresh := ""
	if asAlways {
		fresh = out
	}
	return []fastPathRow{
		{name: "unknown to the stack", path: bpf.FastPathAuto, in: in, out: fresh},
		{name: "SYN", path: bpf.FastPathAuto, in: in, flags: testenv.SYN, out: fresh},
		{name: "both sides delivered by the stack", path: bpf.FastPathAuto, known: known, in: in, out: out},
		{name: "never at a pod", path: bpf.FastPathAuto, never: "pod", in: in},
	}
}

// withHooksShown returns the programs, loaded once more on the same maps, as on a kernel that shows its hooks, or not.
func withHooksShown(t *testing.T, loaded *ebpf.Collection, sees uint32) *ebpf.Collection {
	t.Helper()
	spec, err := newSpec()
	testenv.Must(t, err)
	var config bpf.HostConfig
	variable := spec.Variables[bpf.VarConfig]
	testenv.Must(t, variable.Get(&config))
	config.SeesHooks = sees
	testenv.Must(t, variable.Set(config))
	shared := map[string]*ebpf.Map{}
	for name, m := range loaded.Maps {
		if name != ".rodata" {
			shared[name] = m
		}
	}
	programs, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: shared})
	testenv.Must(t, err)
	t.Cleanup(programs.Close)
	return programs
}

// Only auto records that a connection bypasses the stack without an entry: that voids what is recorded of the stack, also for
// connections of other devices that share the note.
func TestBypassRecorded(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	h := newHost(t)
	h.programs = withHooksShown(t, h.programs, 1)
	for path, recorded := range map[bpf.FastPath]bool{bpf.FastPathAlways: false, bpf.FastPathAuto: true} {
		t.Run(fmt.Sprint(path), func(t *testing.T) {
			eachScene(t, withPorts, func(t *testing.T, s scene) {
				testenv.Must(t, errors.Join(h.reset(), h.emptyForwardingCache()))
				for _, pod := range []string{"pod", "pod2"} {
					testenv.Must(t, h.putFastPathEndpoint(s.addressing, pod, path))
				}
				p := s.packet("pod:4000 > pod2:80", false)
				copy(p.DstMAC[:], h.device(bpf.ProgFromContainer).HardwareAddr)
				verdict, _, err := h.runInside(bpf.ProgFromContainer, p.MustBuild())
				testenv.Must(t, errors.Join(err, checkVerdict(verdict, verdictRedirect)))
				notes := make([]bpf.StackNote, len(notePlaces))
				_, err = h.programs.Maps[bpf.MapStackNotes].BatchLookup(new(ebpf.MapBatchCursor), make([]uint32, len(notePlaces)), notes, nil)
				if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
					t.Fatal(err)
				}
				if got := slices.ContainsFunc(notes, func(n bpf.StackNote) bool { return n.Bypassed != 0 }); got != recorded {
					t.Errorf("a bypass is recorded: %v, want %v", got, recorded)
				}
			})
		})
	}
}
