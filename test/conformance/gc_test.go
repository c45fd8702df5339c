package conformance

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	currentKey = "cni.dev/valid-attachments"
	taggedKey  = "cni.dev/attachments" // in the specification as tagged 1.1.0
)

// gc calls GC directly: libcni would call DEL first.
func (h *host) gc(t *testing.T, conf object) {
	t.Helper()
	wantSuccess(t, h.tryGC(t, conf), "")
}

func (h *host) tryGC(t *testing.T, conf object) *testenv.Call {
	t.Helper()
	return h.call(t, map[string]string{"CNI_COMMAND": "GC", "CNI_PATH": "/opt/cni/bin"}, encode(t, conf))
}

// attachments returns GC's list of valid attachments.
func attachments(ids ...string) list {
	valid := list{}
	for _, id := range ids {
		valid = append(valid, object{"containerID": id, "ifname": "eth0"})
	}
	return valid
}

// TestGC calls GC with three containers: a running one, an idle one that is missing from the runtime's list, and
// one whose namespace has vanished.
func TestGC(t *testing.T) {
	h := newHost(t)
	conf := with(dual("1.1.0"), "runtimeConfig.portMappings", list{})
	for _, test := range []struct {
		name string
		conf object
		kept int // how many of them, in that order
	}{
		{"current key", withKey(conf, currentKey, attachments("live")), 1},
		{"tagged key", withKey(conf, taggedKey, attachments("live")), 1},
		{"both keys", withKey(withKey(conf, currentKey, attachments("live")), taggedKey, attachments("live")), 1},
		{"different keys: either keeps", withKey(withKey(conf, currentKey, attachments("live")), taggedKey, attachments("idle")), 2},
		{"unknown attachments", withKey(conf, currentKey, attachments("live", "never")), 1},
		{"absent: only dead ones", conf, 2},
		{"null: only dead ones", withKey(conf, currentKey, nil), 2},
		{"both null", withKey(withKey(conf, currentKey, nil), taggedKey, nil), 2},
		{"null and a list", withKey(withKey(conf, taggedKey, nil), currentKey, attachments("live")), 1},
		{"empty: all", withKey(conf, currentKey, list{}), 0},
		{"empty, tagged key", withKey(conf, taggedKey, list{}), 0},
		{"configuration that ADD refuses", withKey(with(conf, "ipmask", 1), currentKey, attachments("live")), 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			snapshots := []testenv.Snapshot{h.snapshot(t)}
			live := h.pod(t, "live", withPort(conf, 8080))
			live.add(t)
			snapshots = append(snapshots, h.snapshot(t))
			idle := h.pod(t, "idle", withPort(conf, 8081))
			idle.add(t)
			snapshots = append(snapshots, h.snapshot(t))
			gone := h.pod(t, "gone", withPort(conf, 8082))
			gone.add(t)
			gone.vanish(t)
			h.gc(t, test.conf)
			h.gc(t, test.conf)
			h.waitUnchanged(t, snapshots[test.kept])
			if test.kept > 0 {
				wantSuccess(t, live.try(t, "CHECK"), "")
				wantPing(t, live.Namespace, testenv.OutsideAddr4)
			}
		})
	}
}

// withPort returns conf with a host port that is forwarded to port 80.
func withPort(conf object, port int) object {
	return with(conf, "runtimeConfig.portMappings", list{object{"hostPort": port, "containerPort": 80}})
}

// TestGCOtherNetworks calls GC for one of three networks that share a directory and a datapath. Containers of the
// others stay.
func TestGCOtherNetworks(t *testing.T) {
	h := newHost(t)
	other := with(dual("1.1.0"), "name", "other")
	other = with(other, "ipam.ranges", list{list{object{"subnet": "10.89.0.0/16"}}})
	other = with(other, "ipam.routes", list{})
	neighbor := h.pod(t, "live", withPort(other, 9090))
	neighbor.add(t)
	// "pod" is a prefix of "pods".
	prefix := with(with(other, "name", "pod"), "ipam.ranges", list{list{object{"subnet": "10.90.0.0/16"}}})
	similar := h.pod(t, "c3", prefix)
	similar.add(t)
	before := h.snapshot(t, neighbor.Namespace, similar.Namespace)

	mine := h.pod(t, "mine", withPort(dual("1.1.0"), 8080))
	mine.add(t)
	h.gc(t, withKey(dual("1.1.0"), currentKey, list{}))
	h.wantUnchanged(t, before, neighbor.Namespace, similar.Namespace)
	wantSuccess(t, neighbor.try(t, "CHECK"), "")
	wantPing(t, neighbor.Namespace, netip.MustParseAddr("10.89.0.1"))
}

// TestGCInterfaces removes one of a container's two interfaces.
func TestGCInterfaces(t *testing.T) {
	h := newHost(t)
	first := h.pod(t, "c1", dual("1.1.0"))
	first.add(t)
	before := h.snapshot(t, first.Namespace)
	second := first.second(t, "net1")
	second.add(t)
	h.gc(t, withKey(dual("1.1.0"), currentKey, attachments("c1")))
	h.wantUnchanged(t, before, first.Namespace)
}

// TestGCFiles calls GC with reservations that no device belongs to, and with those of old versions of host-local,
// which name the container only.
func TestGCFiles(t *testing.T) {
	h := newHost(t)
	live := h.pod(t, "live", dual("1.1.0"))
	live.add(t)
	before := h.snapshot(t, live.Namespace)
	for _, test := range []struct {
		name, file, content string
		conf                object
		kept                bool
	}{
		{"dead container", "10.88.7.1", "dead\r\neth0", withKey(dual("1.1.0"), currentKey, attachments("live")), false},
		{"dead container, no list", "10.88.7.1", "dead\r\neth0", dual("1.1.0"), false},
		{"torn", "10.88.7.2", "", withKey(dual("1.1.0"), currentKey, attachments("live")), false},
		{"old, dead container", "10.88.7.3", "dead", withKey(dual("1.1.0"), currentKey, attachments("live")), false},
		{"old, valid container", "10.88.7.4", "live", withKey(dual("1.1.0"), currentKey, attachments("live")), true},
		{"old, running container, no list", "10.88.7.5", "live", dual("1.1.0"), true},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := filepath.Join(testenv.ReservationDir, "pods", test.file)
			testenv.Must(t, os.WriteFile(path, []byte(test.content), 0o644))
			if call := h.tryGC(t, test.conf); call.Exit != 0 || len(call.Stdout) != 0 { // stderr may have a warning
				t.Errorf("GC: got %v, stdout %q; want success", call.Err(), call.Stdout)
			}
			if _, err := os.Stat(path); (err == nil) != test.kept {
				t.Errorf("reservation kept: got %v, want %v", err == nil, test.kept)
			}
			os.Remove(path)
			h.wantUnchanged(t, before, live.Namespace)
		})
	}
}

// TestGCErrors checks that GC removes nothing if its list is invalid.
func TestGCErrors(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	before := h.snapshot(t, p.Namespace)
	for _, key := range []string{currentKey, taggedKey} {
		for _, value := range []any{"all", 1, object{}, list{"c1"}, list{object{"containerID": 1}}} {
			wantError(t, h.tryGC(t, withKey(dual("1.1.0"), key, value)), codeInvalidConfig, key, string(encode(t, value)))
		}
	}
	wantError(t, h.tryGC(t, dual("1.0.0")), codeIncompatible, "GC")
	h.wantUnchanged(t, before, p.Namespace)
}

// TestGCContinuesAfterErrors checks that GC reports two things that it cannot remove, and removes all others.
func TestGCContinuesAfterErrors(t *testing.T) {
	h := newHost(t)
	conf := with(withPort(dual("1.1.0"), 8080), "runtimeConfig.aliases", list{"web"})
	p := h.pod(t, "c1", conf)
	before := h.snapshot(t, p.Namespace)
	p.add(t)
	broken, err := filepath.Glob(filepath.Join(record.DefaultDir, "*", "*.json"))
	if err != nil || len(broken) != 1 {
		t.Fatalf("records: got %q (%v), want one", broken, err)
	}
	testenv.Must(t, os.WriteFile(broken[0], []byte("{"), 0o600))
	t.Run("read-only", func(t *testing.T) {
		readOnly(t, testenv.ReservationDir)
		call := h.tryGC(t, withKey(conf, currentKey, list{}))
		wantError(t, call, codeIO, broken[0], filepath.Join(testenv.ReservationDir, "pods"), "read-only file system")
	})
	added, removed := before.Compare(h.snapshot(t, p.Namespace))
	if text := strings.Join(added, "\n"); len(added) != 3 || len(removed) != 0 || strings.Count(text, testenv.ReservationDir) != 2 || strings.Count(text, broken[0]) != 1 {
		t.Errorf("left behind: got %s, want 2 reservations and a record; removed: %v", text, removed)
	}
	testenv.Must(t, os.Remove(broken[0]))
	h.gc(t, withKey(conf, currentKey, list{}))
	h.wantUnchanged(t, before, p.Namespace)
}

// TestGCWhileAdding pauses an ADD that has reserved addresses and has no device yet. A GC without a list must not take
// the container for dead.
func TestGCWhileAdding(t *testing.T) {
	h := newHost(t)
	conf := dual("1.1.0")
	p := h.pod(t, "c1", conf)
	pause, adding := p.addPaused(t, "create the veth pair")
	collecting := make(chan *testenv.Call, 1)
	testenv.Eventually(t, "the reservation", func() error {
		_, err := os.Stat(filepath.Join(testenv.ReservationDir, "pods", "10.88.0.2"))
		return err
	})
	trace := filepath.Join(t.TempDir(), "trace")
	h.wrapPlugin(t, fmt.Sprintf(`exec strace -f -qq -o %s -e trace=flock "$1"`, trace))
	go func() { collecting <- h.tryGC(t, conf) }()
	var collected *testenv.Call
	testenv.Eventually(t, "GC to wait or to end", func() error {
		select {
		case collected = <-collecting:
			return nil
		default:
		}
		if text, err := os.ReadFile(trace); err != nil || !strings.Contains(string(text), "EAGAIN") {
			return fmt.Errorf("system calls: %q (%v)", text, err)
		}
		return nil
	})
	testenv.Must(t, pause.Release())
	if added := <-adding; added == nil || added.Exit != 0 {
		t.Fatalf("ADD: got %+v, want success", added)
	}
	if collected == nil {
		collected = <-collecting
	}
	wantSuccess(t, collected, "")
	if _, err := os.Stat(filepath.Join(testenv.ReservationDir, "pods", "10.88.0.2")); err != nil {
		t.Errorf("reservation of a running container after GC: %v", err)
	}
	p.del(t)
}

// TestGCWhileDevicesChange calls GC while devices come and go, which interrupts netlink dumps, as on a busy node.
func TestGCWhileDevicesChange(t *testing.T) {
	const calls = 40
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	before := h.snapshot(t, p.Namespace)

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- churn(ctx, h.Node.Netlink()) }()
	for range calls {
		if call := h.tryGC(t, withKey(dual("1.1.0"), currentKey, attachments("c1"))); call.Exit != 0 {
			t.Errorf("GC: %v", call.Err())
			break
		}
	}
	cancel()
	testenv.Must(t, <-done)
	h.wantUnchanged(t, before, p.Namespace)
}

// churn adds and removes devices until ctx is done.
func churn(ctx context.Context, handle *netlink.Handle) error {
	for ctx.Err() == nil {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "churn"}, PeerName: "churn-peer"}
		if err := handle.LinkAdd(veth); err != nil {
			return err
		}
		if err := handle.LinkDel(veth); err != nil {
			return err
		}
	}
	return nil
}

// TestGCDeletesTogether removes 4 attachments. The kernel waits for all CPUs once per request.
func TestGCDeletesTogether(t *testing.T) {
	h := newHost(t)
	live := h.pod(t, "live", dual("1.1.0"))
	live.add(t)
	dead := h.pod(t, "dead", dual("1.1.0"))
	before := h.snapshot(t, live.Namespace, dead.Namespace)
	for i := range 4 {
		dead.second(t, fmt.Sprint("eth", i)).add(t)
	}
	trace := filepath.Join(t.TempDir(), "trace")
	h.wrapPlugin(t, fmt.Sprintf(`exec strace -f -qq -o %s -e trace=sendto "$1"`, trace))
	h.gc(t, withKey(dual("1.1.0"), currentKey, attachments("live")))
	text := testenv.ReadFile(t, trace)
	if got := strings.Count(string(text), "RTM_DELLINK"); got != 1 {
		t.Errorf("requests to delete devices: got %d, want 1", got)
	}
	h.wantUnchanged(t, before, live.Namespace, dead.Namespace)
	wantSuccess(t, live.try(t, "CHECK"), "")
}

// TestGCBesideADD holds the lock that an ADD under way holds. GC deletes devices meanwhile, and another ADD succeeds.
// Its container is not in GC's list, which is older, and nor is one that comes back: both stay.
func TestGCBesideADD(t *testing.T) {
	h := newHost(t)
	dead := h.pod(t, "dead", withPort(dual("1.1.0"), 8080))
	back := h.pod(t, "back", withPort(dual("1.1.0"), 8081))
	device := dead.hostDevice(t, dead.add(t)).Attrs().Name
	returning := back.hostDevice(t, back.add(t)).Attrs().Name
	adding, err := flock.Acquire(testenv.Context(t), record.DefaultDir, flock.Shared)
	testenv.Must(t, err)
	defer adding.Release()
	collecting := make(chan *testenv.Call, 1)
	go func() { collecting <- h.tryGC(t, withKey(dual("1.1.0"), currentKey, list{})) }()
	testenv.Eventually(t, "GC to delete the devices", func() error {
		for _, name := range []string{device, returning} {
			if _, err := h.Node.Netlink().LinkByName(name); err == nil {
				return fmt.Errorf("%s exists", name)
			}
		}
		return nil
	})
	back.del(t)
	back.add(t)
	late := h.pod(t, "late", withPort(dual("1.1.0"), 8082))
	late.add(t)
	testenv.Must(t, adding.Release())
	wantSuccess(t, <-collecting, "")
	wantSuccess(t, back.try(t, "CHECK"), "")
	wantSuccess(t, late.try(t, "CHECK"), "")
	collected := h.snapshot(t, back.Namespace, late.Namespace)
	dead.del(t)
	h.wantUnchanged(t, collected, back.Namespace, late.Namespace) // nothing of it was left
}
