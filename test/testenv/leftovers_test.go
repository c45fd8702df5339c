package testenv

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// TestLeftovers leaves one thing of each kind on a node with a loaded datapath, and wants it reported.
func TestLeftovers(t *testing.T) {
	node := New(t, "node")
	t.Cleanup(func() {
		if err := os.RemoveAll(loader.Root); err != nil {
			t.Error(err)
		}
	})
	var datapath *loader.Datapath
	err := node.Do(func() error {
		loaded, err := loader.Open(Context(t), loader.Options{})
		if err != nil {
			return err
		}
		loaded.Close()
		datapath, err = loader.OpenLoaded() // all maps
		return err
	})
	Must(t, err)
	defer datapath.Close()
	wantLeftovers(t, node)

	for _, test := range []struct {
		name  string
		leave func(*testing.T) (undo func() error)
		want  []string // parts of the reported things, in order
	}{
		{"device with our name", leaveDevice(node, "ebpf0123", ""), []string{"device ebpf0123"}},
		{"device with our alias", leaveDevice(node, "veth0", "ebpfnet pods c1 eth0"), []string{"device veth0 (ebpfnet pods c1 eth0)"}},
		{"endpoint", leaveEntry(datapath.Endpoints), []string{"1 entries in map endpoints", "endpoint "}},
		{"device entry", leaveEntry(datapath.Devices), []string{"1 entries in map devices", "device entry 1 of owner "}},
		{"host port", leaveEntry(datapath.HostPorts), []string{"1 entries in map host_ports", "host port "}},
		{"prefix", leaveEntry(datapath.Prefixes), []string{"1 entries in map prefixes"}},
		{"drop counter", leaveEntry(datapath.Drops), []string{"drop counter "}},
		{"pinned map", leavePin(filepath.Join(datapath.Dir(), "maps", "foreign")), []string{"maps/foreign"}},
		{"pinned program", leavePin(filepath.Join(datapath.Dir(), "progs", "foreign")), []string{"progs/foreign"}},
		{"pinned link of lo", leavePin(filepath.Join(datapath.Dir(), "links", "loopback-to_loopback")), []string{"links/loopback-to_loopback"}},
		{"pinned link of a pod", leavePin(filepath.Join(datapath.Dir(), "links", "uplink-3-from_container")), []string{"links/uplink-3-from_container"}},
		{"unfinished load", leavePin(filepath.Join(loader.Root, "tmp-netns-1")), []string{"tmp-netns-1"}},
		{"reservation", leaveFile(filepath.Join(ReservationDir, "pods", "10.88.0.2")), []string{`pods/10.88.0.2: "c1"`}},
		{"lock of reservations", leaveFile(filepath.Join(ReservationDir, "pods", "lock")), nil},
		{"record", leaveFile(filepath.Join(record.DefaultDir, "netns-1", "0123.json")), []string{`netns-1/0123.json: "c1"`}},
	} {
		t.Run(test.name, func(t *testing.T) {
			undo := test.leave(t)
			wantLeftovers(t, node, test.want...)
			Must(t, undo())
			wantLeftovers(t, node)
		})
	}
}

func wantLeftovers(t *testing.T, node *Namespace, want ...string) {
	t.Helper()
	got, err := Leftovers(node)
	Must(t, err)
	matches := len(got) == len(want)
	for i := range min(len(got), len(want)) {
		matches = matches && strings.Contains(got[i], want[i])
	}
	if !matches {
		t.Errorf("leftovers: got %q, want %q", got, want)
	}
}

func leaveDevice(node *Namespace, name, alias string) func(*testing.T) func() error {
	return func(t *testing.T) func() error {
		t.Helper()
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "peer"}
		Must(t, errors.Join(node.rtnl.LinkAdd(veth), node.rtnl.LinkSetAlias(veth, alias)))
		return func() error { return node.rtnl.LinkDel(veth) }
	}
}

func leaveEntry(m *ebpf.Map) func(*testing.T) func() error {
	return func(t *testing.T) func() error {
		t.Helper()
		key := make([]byte, m.KeySize())
		key[0] = 1
		Must(t, m.Put(key, make([]byte, m.ValueSize())))
		return func() error { return m.Delete(key) }
	}
}

func leavePin(path string) func(*testing.T) func() error {
	return func(t *testing.T) func() error {
		t.Helper()
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
		Must(t, err)
		defer m.Close()
		Must(t, m.Pin(path))
		return func() error { return os.Remove(path) }
	}
}

func leaveFile(path string) func(*testing.T) func() error {
	return func(t *testing.T) func() error {
		t.Helper()
		err := os.MkdirAll(filepath.Dir(path), 0o755)
		if err = errors.Join(err, os.WriteFile(path, []byte("c1"), 0o600)); err != nil {
			t.Fatal(err)
		}
		return func() error { return os.RemoveAll(filepath.Dir(path)) }
	}
}
