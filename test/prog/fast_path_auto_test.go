package prog

import (
	"errors"
	"fmt"
	"math/rand/v2"
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

const forwardHook = "table inet hooks { chain forward { type filter hook forward priority 0; }; }"

func (h *host) nft(t *testing.T, commands string) {
	t.Helper()
	_, err := h.Run(testenv.Context(t), "nft", commands)
	testenv.Must(t, err)
}

// changeNotes changes all notes of what the stack has.
func (h *host) changeNotes(change func(*bpf.StackNote)) error {
	m := h.programs.Maps[bpf.MapStackNotes]
	notes := make([]bpf.StackNote, len(notePlaces))
	for i, place := range notePlaces {
		if err := m.Lookup(place, &notes[i]); err != nil {
			return err
		}
		change(&notes[i])
	}
	_, err := m.BatchUpdate(notePlaces, notes, nil)
	return err
}

// A packet that goes through the stack shows a returned hook to all CPUs: conntrack takes packets for invalid if others of their
// connection, which it has not seen, bypass the stack meanwhile.
func TestHooksReturn(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	testenv.Require(t, twoCPUs)
	h := newHost(t)
	h.programs = withHooksShown(t, h.programs, 1)
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		send := func(cpu int, port uint16, want uint32) error {
			p := s.packet(fmt.Sprintf("pod:%d > pod2:80", port), false)
			copy(p.DstMAC[:], h.device(bpf.ProgFromContainer).HardwareAddr)
			return h.on(cpu, func() error {
				verdict, _, err := h.run(bpf.ProgFromContainer, p.MustBuild())
				return errors.Join(err, checkVerdict(verdict, want))
			})
		}
		testenv.Must(t, errors.Join(h.reset(), h.putFastPathEndpoint(s.addressing, "pod", bpf.FastPathAuto),
			h.putFastPathEndpoint(s.addressing, "pod2", bpf.FastPathAuto), send(0, 4000, verdictRedirect)))
		h.nft(t, forwardHook)
		defer h.nft(t, "delete table inet hooks")
		port := uint16(4000)
		testenv.Eventually(t, "another connection to see the hook", func() error {
			port++
			return send(1, port, verdictNext)
		})
		testenv.NoError(t, send(0, 4000, verdictNext))
	})
}

// A return of hooks is known by what the way had a jiffy ago. If another way uses its note, decisions end once per tick.
func TestHooksReturnOnce(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	h := newHost(t)
	h.programs = withHooksShown(t, h.programs, 1)
	h.nft(t, forwardHook)
	const none, some, otherJiffy = 0, 1, 1 << 20
	for _, c := range []struct {
		name   string
		change func(seen *bpf.StackNote, now uint32)
		voids  bool
	}{
		{"unused", func(n *bpf.StackNote, _ uint32) { *n = bpf.StackNote{} }, false},
		{"without hooks", func(n *bpf.StackNote, _ uint32) { n.Hooks = (n.Hooks ^ otherJiffy) &^ 0xff }, true},
		{"without hooks again", func(n *bpf.StackNote, now uint32) { n.Hooks, n.Voided = (n.Hooks^otherJiffy)&^0xff, now }, true},
		{"with hooks", func(n *bpf.StackNote, _ uint32) { n.Hooks ^= otherJiffy }, false},
		{"another way's, without hooks", func(n *bpf.StackNote, _ uint32) { n.Hooks = (n.Hooks ^ 1<<32) &^ 0xff }, true},
		{"another way's, without hooks again", func(n *bpf.StackNote, now uint32) { n.Hooks, n.Voided = (n.Hooks^1<<32)&^0xff, now }, false},
		{"another way's, with hooks", func(n *bpf.StackNote, _ uint32) { n.Hooks ^= 1 << 32 }, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, s := range (row{on: []proto{udp}}).scenes() {
				p := s.packet(between, false)
				find := func() {
					found, _, err := h.runInside(bpf.ProgStackHooks, p.MustBuild())
					if err != nil || found == none {
						t.Fatalf("stack_hooks: got %d, %v, want a hook", found, err)
					}
				}
				for start := ticks(0) - 1; start != ticks(0); { // until one tick has the whole run
					start = ticks(0)
					testenv.Must(t, h.clearStackNotes())
					find()
					testenv.Must(t, errors.Join(h.changeNotes(func(n *bpf.StackNote) { c.change(n, start) }), h.setGeneration(some)))
					find()
					var got uint64
					testenv.Must(t, h.programs.Maps[bpf.MapGeneration].Lookup(uint32(0), &got))
					if voids := got != some; voids != c.voids && start == ticks(0) {
						t.Errorf("%s: decisions are void: %v, want %v", s.name, voids, c.voids)
					}
				}
			}
		})
	}
}

// What a way had in this jiffy does not hold in a new generation: decisions would be made from before the hooks' return.
func TestHooksReturnInJiffy(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	h := newHost(t)
	h.programs = withHooksShown(t, h.programs, 1)
	h.nft(t, forwardHook)
	frame := (row{on: []proto{udp}}).scenes()[0].packet(between, false).MustBuild()
	for range 100 { // some of them within one jiffy
		_, _, err := h.runInside(bpf.ProgStackHooks, frame)
		testenv.Must(t, errors.Join(err, h.changeNotes(func(n *bpf.StackNote) { n.Hooks &^= 0xff }),
			h.setGeneration(rand.Uint64())))
		if found, _, err := h.runInside(bpf.ProgStackHooks, frame); err != nil || found == 0 {
			t.Fatalf("stack_hooks: got %d, %v, want a hook", found, err)
		}
	}
}
