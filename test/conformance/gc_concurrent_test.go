package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

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
	text, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
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
	if err != nil {
		t.Fatal(err)
	}
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
	if err := adding.Release(); err != nil {
		t.Fatal(err)
	}
	wantSuccess(t, <-collecting, "")
	wantSuccess(t, back.try(t, "CHECK"), "")
	wantSuccess(t, late.try(t, "CHECK"), "")
	collected := h.snapshot(t, back.Namespace, late.Namespace)
	dead.del(t)
	h.wantUnchanged(t, collected, back.Namespace, late.Namespace) // nothing of it was left
}
