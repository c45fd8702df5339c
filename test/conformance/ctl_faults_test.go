package conformance

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// fill puts entries into a map until it is full. Its keys end with a number.
func fill(t *testing.T, m *ebpf.Map) {
	t.Helper()
	key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
	if m.Type() == ebpf.LPMTrie {
		binary.NativeEndian.PutUint32(key, 8*(m.KeySize()-4)) // all bits
	}
	for n := range m.MaxEntries() {
		binary.NativeEndian.PutUint32(key[len(key)-4:], 1<<30+n)
		if err := m.Put(key, value); errors.Is(err, unix.E2BIG) || errors.Is(err, unix.ENOSPC) {
			return // it had entries before
		} else if err != nil {
			t.Fatal(err)
		}
	}
}

// TestFullMap wants the error of a full map, after which the runtime tries again.
func TestFullMap(t *testing.T) {
	h := newLoadedHost(t)
	h.withDatapath(t, func(d *loader.Datapath) error {
		fill(t, d.Uplinks)
		fill(t, d.Prefixes)
		route := maps.Route{To: netip.MustParsePrefix("203.0.113.0/24"), Gateway: testenv.OutsideAddr4}
		return maps.With(testenv.Context(t), d, func(store *maps.Store) error {
			for name, err := range map[string]error{
				"uplink": store.SetUplink(maps.Uplink{IfIndex: 99}), "route": store.AddRoutes([]maps.Route{route}),
			} {
				if !errors.Is(err, maps.ErrFull) {
					t.Errorf("%s: got %v, want %v", name, err, maps.ErrFull)
				}
			}
			return nil
		})
	})
	testenv.Must(t, os.RemoveAll(loader.Root))
}

// TestCtlFullRuleSets changes a policy where no rule set is left: the container keeps its settings. doctor names the map.
func TestCtlFullRuleSets(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	h.wantCtl(t, 0, []string{"set", "pods/c1", "antiSpoof=false"})
	fillRuleSets := func(d *loader.Datapath) error {
		err := d.OpenOnDemand(bpf.MapRuleSets)
		fill(t, d.RuleSets)
		return err
	}
	h.withDatapath(t, fillRuleSets)
	h.wantCtl(t, 1, []string{"set", "pods/c1", "ingressPolicy=isolated"}, "in use")
	wantSuccess(t, p.try(t, "CHECK"), "")
	files, err := filepath.Glob(filepath.Join(record.DefaultDir, "*", "*.json"))
	if err != nil || len(files) != 1 {
		t.Fatalf("records: got %v (%v), want 1", files, err)
	}
	if text := string(testenv.ReadFile(t, files[0])); strings.Contains(text, "isolated") || !strings.Contains(text, "antiSpoof") {
		t.Errorf("record: got %s, want the settings of before", text)
	}
	h.withDatapath(t, fillRuleSets) // what no policy has is removed after a failure
	if _, stdout, _ := h.ctl(t, "doctor"); !strings.Contains(stdout, bpf.MapRuleSets) {
		t.Errorf("doctor: got %s, want %s", stdout, bpf.MapRuleSets)
	}
	p.del(t)
	testenv.Must(t, os.RemoveAll(loader.Root))
}

// TestRepairMeanwhile repairs a host where a container ends meanwhile.
func TestRepairMeanwhile(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	err := h.Node.Do(func() error {
		host, err := admin.Open(loader.OpenLoaded, "")
		if err != nil {
			return err
		}
		defer host.Close()
		p.vanish(t)
		_, err = host.Repair(testenv.Context(t))
		return err
	})
	if err != nil {
		t.Errorf("got %v, want success", err)
	}
	p.del(t)
}

// TestUnreadableRecord runs commands beside a record that cannot be read.
func TestUnreadableRecord(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.aliases", list{"web"}))
	p.add(t)
	files, err := filepath.Glob(filepath.Join(record.DefaultDir, "netns-*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("directories: got %v (%v), want 1", files, err)
	}
	broken := filepath.Join(files[0], "00000000000000ff.json")
	testenv.Must(t, os.WriteFile(broken, []byte("{"), 0o600))
	for _, args := range [][]string{{"repair"}, {"status"}, {"set", "pods/c1", "antiSpoof=false"}} {
		h.wantCtl(t, 0, args)
	}
	if exit, stdout, stderr := h.ctl(t, "top", "--interval", "100ms"); exit != 1 || !strings.Contains(stdout, "c1") || !strings.Contains(stderr, broken) {
		t.Errorf("top: got exit code %d, %q, %q; want the container, and the record that it could not read", exit, stdout, stderr)
	}
	if exit, _, stderr := h.ctl(t, "unload"); exit != 1 || !strings.Contains(stderr, "c1") {
		t.Errorf("unload without --yes: got exit code %d, %q; want it to name the container", exit, stderr)
	}
	testenv.Must(t, os.Remove(broken))
	p.del(t)
}

// TestPartialPins loads the datapath where somebody has removed a pin without which it cannot be opened.
func TestPartialPins(t *testing.T) {
	h := newLoadedHost(t)
	configs, err := filepath.Glob(filepath.Join(loader.Root, "netns-*", "maps", "config"))
	if err != nil || len(configs) != 1 {
		t.Fatalf("got %v (%v), want 1", configs, err)
	}
	testenv.Must(t, os.Remove(configs[0]))
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	wantSuccess(t, p.try(t, "CHECK"), "")
	p.del(t)
}

// TestUnloadFails wants an unload that fails, or is killed, at its rename to have removed the routes: after it, nobody would.
func TestUnloadFails(t *testing.T) {
	h := newLoadedHost(t)
	cmd := exec.CommandContext(testenv.Context(t), "strace", "-f", "-qq", "-o", "/dev/null",
		"-e", "inject=renameat:error=EBUSY", testenv.Build(t, "./cmd/ebpfnetctl"), "unload", "--yes")
	var out []byte
	testenv.Must(t, h.Node.Do(func() (err error) {
		out, err = cmd.CombinedOutput()
		if err == nil {
			return fmt.Errorf("got %s, want an error", out)
		}
		return nil
	}))
	if routes, err := h.Node.Run(testenv.Context(t), "ip", "route", "show", "proto", "236"); err != nil || routes != "" {
		t.Errorf("routes after %s: got %q (%v), want none", out, routes, err)
	}
	h.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
}

// TestSetReleasesLock changes the rules of two containers. Others get the datapath's lock in between.
func TestSetReleasesLock(t *testing.T) {
	h := newHost(t)
	pods := []*pod{h.pod(t, "c1", dual("1.1.0")), h.pod(t, "c2", dual("1.1.0"))}
	for _, p := range pods {
		p.add(t)
	}
	trace := filepath.Join(t.TempDir(), "trace")
	cmd := exec.CommandContext(testenv.Context(t), "strace", "-f", "-qq", "-o", trace, "-e", "trace=flock",
		testenv.Build(t, "./cmd/ebpfnetctl"), "set", "pods", "ingressPolicy=isolated")
	testenv.Must(t, h.Node.Do(func() error { return cmd.Run() }))
	text := string(testenv.ReadFile(t, trace))
	if got := strings.Count(text, "LOCK_EX"); got != len(pods) {
		t.Errorf("locks: got %d, want %d: %s", got, len(pods), text)
	}
	for _, p := range pods {
		wantSuccess(t, p.try(t, "CHECK"), "")
		p.del(t)
	}
}
