package scenario

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// foreignProgram is another tool's program, which counts packets and passes them on.
type foreignProgram struct {
	*ebpf.Program
	count *ebpf.Map
}

func newForeignProgram(t *testing.T) *foreignProgram {
	t.Helper()
	count, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { program.Close() })
	return &foreignProgram{program, count}
}

// seen returns how many packets the program saw so far.
func (p *foreignProgram) seen(t *testing.T) uint64 {
	t.Helper()
	var packets uint64
	if err := p.count.Lookup(uint32(0), &packets); err != nil {
		t.Fatal(err)
	}
	return packets
}

// foreignHook is a place where a foreign program stands.
type foreignHook struct {
	name    string
	program *foreignProgram
}

// attachForeign puts a foreign program on both directions of a device.
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

// seesMore fails unless every program sees packets of what happens.
func seesMore(t *testing.T, hooks []foreignHook, happens func()) {
	t.Helper()
	before := make([]uint64, len(hooks))
	for i, hook := range hooks {
		before[i] = hook.program.seen(t)
	}
	happens()
	for i, hook := range hooks {
		if hook.program.seen(t) == before[i] {
			t.Errorf("the foreign program %s sees no packet", hook.name)
		}
	}
}

// Other tools' programs stand before and after ours, some from before the datapath, and see
// all packets whatever pods come and go.
func TestForeignTCXPrograms(t *testing.T) {
	needsStack(t)
	testenv.Require(t, testenv.TCX)

	n := newNetwork(t)
	hooks := attachForeign(t, n, testenv.UplinkName, nil, "that was first")
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	hostDevice := web.Result.Interfaces[0].Name
	for _, device := range []string{testenv.UplinkName, hostDevice} {
		hooks = append(hooks, attachForeign(t, n, device, link.Head(), "before ours")...)
		hooks = append(hooks, attachForeign(t, n, device, link.Tail(), "after ours")...)
	}
	byEachProtocol(t, func(t *testing.T, f family, protocol string) {
		serve(t, web.Namespace, protocol, at(f.pod(web), 80))
		server := serve(t, n.Outside, protocol, at(f.outside, 0))
		inAndOut := func() {
			reachAsOneself(t, n.Outside, protocol, at(f.node, 8080), web.Namespace)
			reachAsNode(t, web.Namespace, protocol, server, n.Outside, f.node)
		}
		seesMore(t, hooks, inAndOut)

		other := n.AddPod(t, "other", nil)
		seesMore(t, hooks, inAndOut)
		del(t, other)
		seesMore(t, hooks, inAndOut)
	})
	if err := web.Check(testenv.Context(t)); err != nil {
		t.Errorf("CHECK with foreign programs: %v", err)
	}
}
