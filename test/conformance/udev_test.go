package conformance

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// startUdevd starts udevd in the node, with our rules and no others.
const startUdevd = `
mkdir /run/pins
mount --bind /sys/fs/bpf /run/pins
mount -t sysfs sysfs /sys
mount --move /run/pins /sys/fs/bpf
mount -t tmpfs tmpfs /lib/udev/rules.d
exec /lib/systemd/systemd-udevd`

// TestUdev runs udevd with the packaged rules. Devices that are created or renamed while it runs get the programs of an
// uplink, and those of containers start nothing.
func TestUdev(t *testing.T) {
	h := newHost(t)
	conf := with(dual("1.1.0"), "uplinks", list{testenv.UplinkName, "wan*"})
	h.pod(t, "c1", conf).add(t)
	runs := h.startUdevd(t)

	h.ip(t, "link add veth0 type veth peer name wan0")
	testenv.Eventually(t, "programs of the new device", func() error { return h.hasUplinks(testenv.UplinkName, "wan0") })
	h.ip(t, "link add other type veth peer name veth1")
	h.ip(t, "link set other name wan1")
	testenv.Eventually(t, "programs of the renamed device", func() error { return h.hasUplinks(testenv.UplinkName, "wan0", "wan1") })
	h.pod(t, "c2", conf).add(t)
	if _, err := h.Node.Run(testenv.Context(t), "udevadm", "settle"); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(runs); err != nil || strings.Contains(string(text), "veth") || strings.Contains(string(text), "ebpf") {
		t.Errorf("devices for which the rules ran ebpfnetctl: got %q (%v), want none of a container", text, err)
	}
}

// startUdevd runs udevd until the end of the test. It returns the file that lists the devices for which the rules ran
// ebpfnetctl.
func (h *host) startUdevd(t *testing.T) (runs string) {
	t.Helper()
	dir := t.TempDir()
	runs = filepath.Join(dir, "runs")
	script := "#!/bin/sh\necho \"$INTERFACE\" >>" + runs + "\nexec " + testenv.Build(t, "./cmd/ebpfnetctl") + " \"$@\"\n"
	rules := testenv.ReadFile(t, "../../cmd/ebpfnetctl/hooks/90-ebpfnet.rules")
	t.Cleanup(func() { os.RemoveAll("/run/udev") })
	testenv.Must(t, errors.Join(
		os.WriteFile(filepath.Join(dir, "ebpfnetctl"), []byte(script), 0o755),
		os.MkdirAll("/run/udev/rules.d", 0o755),
		os.WriteFile("/run/udev/rules.d/90-ebpfnet.rules", []byte(strings.ReplaceAll(string(rules), "@SBIN@", dir)), 0o644),
	))
	cmd := h.Node.Command(testenv.Context(t), "unshare", "--mount", "sh", "-ec", startUdevd)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	testenv.Must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(unix.SIGTERM)
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("udevd: %s", &stderr)
		}
		os.Remove("/run/pins")
	})
	testenv.Eventually(t, "udevd", func() error {
		_, err := h.Node.Run(testenv.Context(t), "udevadm", "control", "--ping")
		return err
	})
	return runs
}

// ip runs the command ip on the node.
func (h *host) ip(t *testing.T, args string) {
	t.Helper()
	if _, err := h.Node.Run(testenv.Context(t), "ip", strings.Fields(args)...); err != nil {
		t.Fatal(err)
	}
}

// TestHookStorm calls hooks in all states of the datapath and of other hooks. Where nothing is loaded, they load nothing.
// While one works and one waits, others leave it to the one that waits.
func TestHookStorm(t *testing.T) {
	h := newHost(t)
	h.wantCtl(t, 0, []string{"repair", "--hook"}, "")
	if _, err := os.Stat(loader.Root); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("pins after a hook: got %v, want none", err)
	}
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	h.wantCtl(t, 0, []string{"repair", "--hook"}, "nothing to repair")
	dir := ""
	h.withDatapath(t, func(datapath *loader.Datapath) error { dir = datapath.Dir(); return nil })
	lock := func(name string) *flock.Lock {
		l, err := flock.Acquire(testenv.Context(t), filepath.Join(dir, name), flock.Exclusive)
		testenv.Must(t, err)
		return l
	}
	working := lock("progs")
	done := make(chan string)
	go func() {
		text := ""
		for text == "" { // it leaves the work to this test, which may have the lock for a moment
			_, out, stderr := h.ctl(t, "repair", "--hook")
			text = out + stderr
		}
		done <- text
	}()
	testenv.Eventually(t, "a hook to wait", func() error {
		l, err := flock.Acquire(canceled(t), filepath.Join(dir, "maps"), flock.Exclusive)
		if errors.Is(err, flock.ErrBusy) {
			return nil
		}
		return errors.Join(errors.New("no hook waits"), l.Release())
	})
	h.ip(t, "link add eth2 type veth peer name peer")
	if exit, out, stderr := h.ctl(t, "repair", "--hook"); exit != 0 || out+stderr != "" {
		t.Errorf("third hook: got exit code %d, %q, want 0 and nothing", exit, out+stderr)
	}
	testenv.Must(t, working.Release())
	if out := <-done; !strings.Contains(out, "programs of the new uplink eth2") {
		t.Errorf("second hook: got %q, want it to find eth2", out)
	}
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}
