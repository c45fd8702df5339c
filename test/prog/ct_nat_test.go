package prog

import (
	"errors"
	"fmt"
	"testing"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// ctNAT records that the host's rules translate the connection of between, as in offload.
func (h *host) ctNAT(s scene, between string, ct uint64) (bpf.FlowKey, error) {
	first, second := s.sides(between, false)
	key := bpf.FlowKey{
		Remote: wire(first.Addr()), RemotePort: first.Port(), Local: wire(second.Addr()), LocalPort: second.Port(),
		Protocol: s.number(), Kind: bpf.FlowCTNAT,
	}
	value := bpf.CtNAT{Owner: owners["pod"], Payer: owners["pod"], NatAddr: key.Remote, NatPort: 80, State: bpf.FlowEstablished, LastSeen: ticks(0), Ct: ct}
	return key, h.flows().Put(key, *(*bpf.Flow)(unsafe.Pointer(&value)))
}

// What is not conntrack's entry of the connection, or not one at all, translates nothing: the stack decides, and the
// flow is gone.
func TestTranslationWithoutConntrack(t *testing.T) {
	testenv.Require(t, testenv.VisibleHooks)
	h := newCacheHost(t)
	for name, ct := range map[string]uint64{
		"no memory": 8, "user space": 0x7f0000000000, "not canonical": 0x8000_0000_0000_0000, "kernel code": 0xffffffff81000000, "the end": ^uint64(7),
	} {
		t.Run(name, func(t *testing.T) {
			eachScene(t, withPorts, func(t *testing.T, s scene) {
				var sent, replied bpf.Flow
				err := h.on(0, func() error {
					if err := h.start(s, bpf.FastPathEstablished); err != nil {
						return err
					}
					translated := podToPod
					translated.ct = ct
					key, err := h.ctNAT(s, "remote:80 > pod:4000", ct)
					err = errors.Join(err, h.offload(s, translated),
						h.wantSent(s, "pod", "pod:4000 > remote:80", verdictNext), h.wantSent(s, "pod", forth, verdictNext))
					if err != nil {
						return err
					}
					offload := bpf.FlowKey{Kind: bpf.FlowOffload, Protocol: s.number()}
					first, second := s.sides(podToPod.between, false)
					offload.Remote, offload.RemotePort, offload.Local, offload.LocalPort = wire(first.Addr()), first.Port(), wire(second.Addr()), second.Port()
					for _, k := range []struct {
						key  bpf.FlowKey
						flow *bpf.Flow
					}{{key, &sent}, {offload, &replied}} {
						if err := h.flows().Lookup(k.key, k.flow); !errors.Is(err, ebpf.ErrKeyNotExist) {
							return fmt.Errorf("flow of kind %d: got %v, want none", k.key.Kind, err)
						}
					}
					return nil
				})
				testenv.NoError(t, err)
			})
		})
	}
}
