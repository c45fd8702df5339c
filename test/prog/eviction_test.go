package prog

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// connection is a live masqueraded connection.
type connection struct {
	out testenv.Packet // as sent by the pod
	key bpf.FlowKey
}

// TestRandomEviction evicts entries of many live connections at random. Packets of the pods
// keep their connection's port. Packets of the remotes reach the pod while either entry
// exists, or else after the pod's next packet.
func TestRandomEviction(t *testing.T) {
	const (
		seed        = 20261121
		connections = 300
		steps       = 20000
	)
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	h := newHost(t)
	if err := h.reset(); err != nil {
		t.Fatal(err)
	}
	var live []connection
	recovered := 0
	err := h.Do(func() error {
		for range connections {
			c, err := h.open(random)
			if err != nil {
				return err
			}
			live = append(live, c)
		}
		for range steps {
			c := live[random.IntN(len(live))]
			var err error
			switch random.IntN(4) {
			case 0:
				err = h.sendOut(c)
			case 1:
				if !h.knows(c) {
					recovered++
					err = h.sendOut(c)
				}
				err = errors.Join(err, h.sendBack(c))
			case 2:
				err = ignoreMissing(h.flows().Delete(&c.key))
			case 3:
				err = h.removeBackup(c.key)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	if recovered == 0 {
		t.Error("no connection lost both entries: the test proves nothing")
	}
}

// ignoreMissing returns nil if err says that there was no entry.
func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// open sends the first packets of a random connection in both directions.
func (h *host) open(random *rand.Rand) (connection, error) {
	p, s := randomFlow(random)
	for s.proto != tcp {
		p, s = randomFlow(random)
	}
	p.TCPFlags = testenv.SYN
	leaves, verdict, err := h.transit(bpf.ProgToUplink, p)
	if err != nil || verdict == verdictDrop {
		return connection{}, fmt.Errorf("open %s: verdict %#x, %w", p, verdict, err)
	}
	p.TCPFlags = testenv.ACK
	c := connection{out: p, key: bpf.FlowKey{
		Remote: wire(leaves.Dst), RemotePort: leaves.DstPort, Local: wire(leaves.Src), LocalPort: leaves.SrcPort,
		Protocol: s.number(), Kind: bpf.FlowSNAT,
	}}
	return c, h.sendBack(c)
}

// knows reports whether either entry is left.
func (h *host) knows(c connection) bool {
	var value bpf.Flow
	backup, err := h.backup()
	if err != nil {
		panic(err)
	}
	_, ok := backup[c.key]
	return ok || h.flows().Lookup(&c.key, &value) == nil
}

func (h *host) sendOut(c connection) error {
	leaves, _, err := h.transit(bpf.ProgToUplink, c.out)
	if err == nil && leaves.SrcPort != c.key.LocalPort {
		err = fmt.Errorf("%s leaves from port %d, was %d", c.out, leaves.SrcPort, c.key.LocalPort)
	}
	return err
}

func (h *host) sendBack(c connection) error {
	reply := replyTo(c.out)
	reply.Dst, reply.DstPort = addrOf(c.key.Local), c.key.LocalPort
	back, _, err := h.transit(bpf.ProgFromUplink, reply)
	if err != nil {
		return err
	}
	want := replyTo(c.out)
	want.SrcMAC, want.DstMAC = back.SrcMAC, back.DstMAC
	if diff := testenv.Diff(back, want); diff != "" {
		return fmt.Errorf("reply to %s:\n%s", c.out, diff)
	}
	return nil
}
