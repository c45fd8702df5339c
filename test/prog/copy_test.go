package prog

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	ebpfnetmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// datapathCopy is the copy of datapath that `ebpfnetctl trace` would run, or nil. TestMain closes it.
var datapathCopy *loader.Copy

func (h *host) copied() (*loader.Copy, error) {
	if datapathCopy != nil {
		return datapathCopy, nil
	}
	spec, err := newSpec()
	if err != nil {
		return nil, err
	}
	live := map[string]*ebpf.Map{}
	for name, m := range h.programs.Maps {
		if live[name], err = m.Clone(); err != nil {
			return nil, err
		}
	}
	datapathCopy, err = loader.NewCopy(spec, live)
	return datapathCopy, err
}

// outcomeOf is what a program has done to a packet.
type outcomeOf struct {
	verdict uint32
	frame   []byte
}

func (o outcomeOf) String() string {
	return fmt.Sprintf("verdict %d, packet %x", int32(o.verdict), o.frame)
}

// foretell has the copy of a program tell what becomes of a packet, and requires that the maps stay as they are. It
// knows the entries of the packet's own addresses, and of host ports' targets, as trace does.
func (h *host) foretell(program string, s scene, p testenv.Packet, frame []byte, ports []hostPort) (told outcomeOf, err error) {
	c, err := h.copied()
	if err != nil {
		return told, err
	}
	addresses := []netip.Addr{p.Src, p.Dst}
	for _, port := range ports {
		addresses = append(addresses, s.side(port.to, true).Addr())
	}
	dump := h.dump
	if s.name != "v4" || s.proto != tcp { // it takes milliseconds
		dump = func() (map[string]map[string]string, error) { return nil, nil }
	}
	before, err := dump()
	if err != nil {
		return told, err
	}
	src, dst := netip.AddrPortFrom(p.Src, p.SrcPort), netip.AddrPortFrom(p.Dst, p.DstPort)
	tuple := ebpfnetmaps.Tuple(ebpfnetmaps.Protocol(p.Proto), src, dst, h.device(program).Index, false)
	if err := errors.Join(ebpfnetmaps.FillCopy(c, addresses...), ebpfnetmaps.CopyTuple(c, tuple), h.copyRouted(c)); err != nil {
		return told, err
	}
	err = h.Do(func() error {
		told.verdict, told.frame, err = h.runBy(c.Run, program, frame)
		return err
	})
	after, errDump := dump()
	if err = errors.Join(err, errDump); err != nil {
		return told, err
	}
	for name := range before {
		if !maps.Equal(before[name], after[name]) {
			return told, fmt.Errorf("the copy of %s has changed %s to %v from %v", program, name, after[name], before[name])
		}
	}
	return told, nil
}

// copyRouted copies what from_uplink has noted of a packet with a tag.
func (h *host) copyRouted(c *loader.Copy) error {
	if h.tag == 0 {
		return nil
	}
	var entry bpf.Routed
	place := h.tag % c.Live[bpf.MapRouted].MaxEntries()
	return errors.Join(c.Live[bpf.MapRouted].Lookup(place, &entry), c.All[bpf.MapRouted].Put(place, &entry))
}

// dump returns the entries of the maps that programs write, but of the largest arrays.
func (h *host) dump() (map[string]map[string]string, error) {
	all := map[string]map[string]string{}
	for _, name := range []string{
		bpf.MapFlows, bpf.MapOffloadTCP, bpf.MapOffloadUDP, bpf.MapMasqSources, bpf.MapFragments, bpf.MapFragQueue,
		bpf.MapDrops, bpf.MapDropTotals,
	} {
		m := h.programs.Maps[name]
		all[name] = map[string]string{}
		for key, err := m.NextKeyBytes(nil); key != nil || err != nil; key, err = m.NextKeyBytes(key) {
			if err != nil {
				return nil, fmt.Errorf("walk %s: %w", name, err)
			}
			if m.Type() == ebpf.PerCPUArray {
				var counts []bpf.DropCount
				err = m.Lookup(key, &counts)
				all[name][string(key)] = fmt.Sprint(counts)
			} else {
				var value []byte
				value, err = m.LookupBytes(key)
				all[name][string(key)] = string(value)
			}
			if err != nil {
				return nil, fmt.Errorf("read %s: %w", name, err)
			}
		}
	}
	return all, nil
}

func (o outcomeOf) compare(verdict uint32, frame []byte) error {
	if real := (outcomeOf{verdict, frame}); o.verdict != verdict || !bytes.Equal(o.frame, frame) {
		return fmt.Errorf("the copy has told %v; the program did %v", o, real)
	}
	return nil
}
