package scenario

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/rlimit"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// foreignProgram is another tool's program: it counts packets and passes them on.
type foreignProgram struct {
	*ebpf.Program
	count *ebpf.Map
}

func newForeignProgram(t *testing.T) *foreignProgram {
	t.Helper()
	testenv.Must(t, rlimit.RemoveMemlock()) // before Linux 5.11
	count, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	testenv.Must(t, err)
	t.Cleanup(func() { count.Close() })
	const next = -1 // TCX_NEXT, TC_ACT_UNSPEC
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "foreign", Type: ebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{
			asm.LoadMapValue(asm.R1, count.FD(), 0),
			asm.Mov.Imm(asm.R2, 1),
			asm.StoreXAdd(asm.R1, asm.R2, asm.DWord),
			asm.Mov.Imm(asm.R0, next),
			asm.Return(),
		},
	})
	testenv.Must(t, err)
	t.Cleanup(func() { program.Close() })
	return &foreignProgram{program, count}
}

// seen counts the packets that the program has seen.
func (p *foreignProgram) seen(t *testing.T) uint64 {
	t.Helper()
	var packets uint64
	testenv.Must(t, p.count.Lookup(uint32(0), &packets))
	return packets
}

// foreignHook is an attached foreign program.
type foreignHook struct {
	name    string
	program *foreignProgram
}

// attachForeign attaches a foreign program to each direction of a device.
func attachForeign(t *testing.T, n *network, device string, anchor link.Anchor, where string) (hooks []foreignHook) {
	t.Helper()
	for direction, attach := range map[string]ebpf.AttachType{"ingress": ebpf.AttachTCXIngress, "egress": ebpf.AttachTCXEgress} {
		program := newForeignProgram(t)
		err := n.node().Do(func() error {
			attached, err := link.AttachTCX(link.TCXOptions{
				Interface: indexOf(t, n.node(), device), Program: program.Program, Attach: attach, Anchor: anchor,
			})
			if err == nil {
				t.Cleanup(func() { attached.Close() })
			}
			return err
		})
		if err != nil {
			t.Fatalf("attach a foreign program to %s of %s: %v", direction, device, err)
		}
		hooks = append(hooks, foreignHook{where + " on " + direction + " of " + device, program})
	}
	return hooks
}

// wantSeen wants every program to see packets while send runs.
func wantSeen(t *testing.T, hooks []foreignHook, send func()) {
	t.Helper()
	before := make([]uint64, len(hooks))
	for i, hook := range hooks {
		before[i] = hook.program.seen(t)
	}
	send()
	for i, hook := range hooks {
		if hook.program.seen(t) == before[i] {
			t.Errorf("foreign program %s saw no packet", hook.name)
		}
	}
}

// Other tools' programs, before and after ours and some attached earlier, see all packets while pods come
// and go.
func TestForeignTCXPrograms(t *testing.T) {
	testenv.Require(t, testenv.TCX)

	n := newNetworkWith(t, autoConflist)
	hooks := attachForeign(t, n, testenv.UplinkName, nil, "attached first")
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	hostDevice := web.Result.Interfaces[0].Name
	for _, device := range []string{testenv.UplinkName, hostDevice} {
		hooks = append(hooks, attachForeign(t, n, device, link.Head(), "before ours")...)
		hooks = append(hooks, attachForeign(t, n, device, link.Tail(), "after ours")...)
	}
	wantProgramsBefore(t, n, web, "foreign (program ", "foreign (program ") // ours on a pod's device is a filter
	n.wantSeenAfterEachVerb(t, hooks, web)
	del(t, web)
	n.ctl(t, "unload", "--yes")
	wantSeen(t, onDevice(hooks, testenv.UplinkName), func() { ping(t, n.Outside, testenv.NodeAddr4) })
}

// wantSeenAfterEachVerb wants every program to see the packets of all protocols, at first and after each verb.
func (n *network) wantSeenAfterEachVerb(t *testing.T, hooks []foreignHook, web *testenv.Pod) {
	t.Helper()
	servers := map[string]netip.AddrPort{}
	for _, f := range testenv.Families {
		for _, protocol := range []string{"tcp", "udp"} {
			serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
			servers[f.Name+protocol] = serve(t, n.Outside, protocol, at(f.Outside, 0))
		}
	}
	seen := func() {
		forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) {
			wantSeen(t, hooks, func() { n.reachInAndOut(t, f, protocol, web, servers[f.Name+protocol]) })
		})
	}
	seen()
	n.eachVerb(t, web, seen)
}

// eachVerb runs everything that may change the datapath of a running pod, and calls verify after each.
func (n *network) eachVerb(t *testing.T, running *testenv.Pod, verify func()) {
	t.Helper()
	var other *testenv.Pod
	for _, verb := range []struct {
		name string
		do   func() error
	}{
		{"ADD", func() error { other = n.AddPod(t, "other", nil); return nil }},
		{"CHECK", func() error { return running.Check(testenv.Context(t)) }},
		{"DEL", func() error { del(t, other); return nil }},
		{"STATUS", func() error { return n.Status(testenv.Context(t)) }},
		{"GC", func() error { return n.GC(testenv.Context(t), attachmentOf(running)) }},
		{"upgrade", func() error { _, err := n.upgrade(t, release(9, 9)); return err }},
		{"repair", func() error { n.ctl(t, "repair"); return nil }},
		{"downgrade", func() error { n.ctl(t, "upgrade"); return nil }},
	} {
		if err := verb.do(); err != nil {
			t.Errorf("%s: %v", verb.name, err)
		}
		verify()
		if t.Failed() {
			t.Fatalf("after %s", verb.name)
		}
	}
}

// onDevice returns the programs of one device.
func onDevice(hooks []foreignHook, device string) (selected []foreignHook) {
	for _, hook := range hooks {
		if strings.HasSuffix(hook.name, " of "+device) {
			selected = append(selected, hook)
		}
	}
	return selected
}

// wantProgramsBefore compares the programs that ebpfnetctl lists before ours on a pod's device by their
// prefixes.
func wantProgramsBefore(t *testing.T, n *network, pod *testenv.Pod, prefixes ...string) {
	t.Helper()
	var got []string
	for _, info := range attachmentsOf(t, n) {
		if info.ContainerID == pod.Conf.ContainerID {
			got = info.ProgramsBefore
		}
	}
	if !slices.EqualFunc(got, prefixes, strings.HasPrefix) {
		t.Errorf("programs before ours: got %q, want %q", got, prefixes)
	}
}
