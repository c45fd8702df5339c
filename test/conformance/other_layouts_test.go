package conformance

import (
	"encoding/binary"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// otherLayout returns a version of ebpfnet with another map layout: larger values and an additional map.
func otherLayout() loader.Programs {
	programs := loader.Embedded()
	programs.ABI++
	programs.Revision++
	programs.Build++
	programs.Spec = func() (*ebpf.CollectionSpec, error) {
		spec, err := bpf.LoadDatapath()
		if err != nil {
			return nil, err
		}
		for _, name := range []string{"endpoints", "host_ports", "admitted_flows"} {
			spec.Maps[name].ValueSize += 16
			spec.Maps[name].Value = nil // its BTF
		}
		spec.Programs = nil // they would not match the maps
		spec.Maps["additional"] = &ebpf.MapSpec{Name: "additional", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
		return spec, nil
	}
	return programs
}

// put writes an entry with the fields that all versions have in common, which come first.
func put(m *ebpf.Map, n byte, a maps.Attachment) error {
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	key[0] = n
	binary.NativeEndian.PutUint64(value, uint64(a.Owner()))
	binary.NativeEndian.PutUint32(value[8:], uint32(maps.NetworkToken(a.Network)))
	return m.Put(key, value)
}

// TestOtherLayout runs with a datapath that another version has loaded. ADD, CHECK and ebpfnetctl refuse it and say
// what to do. DEL and GC still remove the entries of their containers.
func TestOtherLayout(t *testing.T) {
	h := newLoadingHost(t)
	conf := dual("1.1.0")
	one, two, three := h.pod(t, "one", conf), h.pod(t, "two", conf), h.pod(t, "three", conf)
	one.add(t)
	two.add(t)
	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
	other := otherLayout()
	err := h.Node.Do(func() error {
		_, err := loader.Open(testenv.Context(t), loader.Options{Programs: &other})
		if !errors.Is(err, loader.ErrIncompatible) {
			t.Errorf("Open: got %v, want ErrIncompatible", err)
		}
		d, err := loader.OpenForRelease()
		if err != nil {
			return err
		}
		defer d.Close()
		for n, p := range []*pod{one, two} {
			a := maps.Attachment{Network: "pods", ContainerID: p.id, IfName: p.ifName}
			if err := errors.Join(put(d.Endpoints, byte(n), a), put(d.HostPorts, byte(n), a), put(d.AdmittedFlows, byte(n), a)); err != nil {
				return err
			}
		}
		return nil
	})
	testenv.Must(t, err)

	reserved := addressesIn(t)
	for verb, p := range map[string]*pod{"ADD": three, "CHECK": one} {
		wantError(t, p.try(t, verb), cnierr.CodeIncompatible, "another version", "unload")
	}
	h.wantCtl(t, 1, []string{"upgrade"}, "another version")
	h.wantCtl(t, 1, []string{"repair"}, "another version")
	h.wantCtl(t, 1, []string{"status"}, "another version")
	h.wantCtl(t, 1, []string{"unload"}, "2 containers", "pods one eth0", "2 host port entries")
	h.wantOwned(t, 2, 2)
	if _, err := three.Netlink().LinkByName("eth0"); err == nil {
		t.Error("failed ADD left eth0 in the container")
	}
	if now := addressesIn(t); !slices.Equal(now, reserved) {
		t.Errorf("reservations after a failed ADD: got %v, want %v", now, reserved)
	}

	one.del(t)
	h.wantOwned(t, 1, 2) // GC removes admitted flows
	h.gc(t, withKey(conf, currentKey, attachments("two")))
	h.wantOwned(t, 1, 1)
	h.gc(t, withKey(conf, currentKey, attachments()))
	h.wantOwned(t, 0, 0)
	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
	three.add(t)
	wantPing(t, three.Namespace, testenv.OutsideAddr4)
	three.del(t)
}

// addressesIn returns the paths of all reservations.
func addressesIn(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(testenv.ReservationDir, "pods", "*[.:]*[0-9]"))
	if err != nil || len(files) == 0 {
		t.Fatalf("reservations: got none (%v), want some", err)
	}
	return files
}

// wantOwned counts the entries in endpoints and host_ports, and in admitted_flows.
func (h *host) wantOwned(t *testing.T, inEach, admitted int) {
	t.Helper()
	err := h.Node.Do(func() error {
		d, err := loader.OpenForRelease()
		if err != nil {
			return err
		}
		defer d.Close()
		for m, want := range map[*ebpf.Map]int{d.Endpoints: inEach, d.HostPorts: inEach, d.AdmittedFlows: admitted} {
			got, err := maps.Entries(m)
			if err != nil || got != want {
				t.Errorf("entries of %s: got %d (%v), want %d", strings.Fields(m.String())[0], got, err, want)
			}
		}
		return nil
	})
	testenv.Must(t, err)
}

// TestGrownCounters upgrades to a version with more drop reasons, and to one with fewer. The counts stay.
func TestGrownCounters(t *testing.T) {
	h := newLoadingHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	count := []bpf.DropCount{{Packets: 7, Bytes: 700}}
	h.withDatapath(t, func(d *loader.Datapath) error {
		counts := make([]bpf.DropCount, ebpf.MustPossibleCPU())
		copy(counts, count)
		return d.DropTotals.Put(uint32(2), counts)
	})
	grown := loader.Embedded()
	grown.Build++
	grown.Spec = func() (*ebpf.CollectionSpec, error) {
		spec, err := bpf.LoadDatapath()
		if err == nil {
			spec.Maps["drop_totals"].MaxEntries += 5
		}
		return spec, err
	}
	refused := grown
	refused.Build++
	refused.Spec = func() (*ebpf.CollectionSpec, error) {
		spec, err := grown.Spec()
		if err == nil {
			spec.Programs["to_loopback"].Instructions = asm.Instructions{asm.Return()} // R0 is not set
		}
		return spec, err
	}
	err := h.Node.Upgrade(testenv.Context(t), refused)
	var verifier *ebpf.VerifierError
	if !errors.As(err, &verifier) {
		t.Errorf("upgrade to invalid programs: got %v, want a verifier error", err)
	}
	own := loader.Embedded()
	for _, programs := range []*loader.Programs{&grown, &own} {
		h.withDatapath(t, func(former *loader.Datapath) error {
			_, err := loader.Upgrade(testenv.Context(t), loader.Options{Programs: programs})
			if lock, errLock := former.Lock(testenv.Context(t)); errLock != nil {
				t.Errorf("a datapath that is open during an upgrade: got %v, want the lock", errLock)
			} else {
				testenv.NoError(t, lock.Release())
			}
			return err
		})
		h.withDatapath(t, func(d *loader.Datapath) error {
			var counts []bpf.DropCount
			err := d.DropTotals.Lookup(uint32(2), &counts)
			if err != nil || d.Config.Build != programs.Build || counts[0] != count[0] {
				t.Errorf("counters of build %x: got %+v (%v), want %+v in build %x", d.Config.Build, counts, err, count[0], programs.Build)
			}
			if got := int(d.DropTotals.MaxEntries()); got != int(bpf.ReasonMax)+5 {
				t.Errorf("counters: got %d, want %d", got, int(bpf.ReasonMax)+5)
			}
			return nil
		})
	}
	p.del(t)
}
