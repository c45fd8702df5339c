package conformance

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// noNamespaces makes files of each kind that are no network namespaces, and returns their paths.
func noNamespaces(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	must := func(err error) {
		t.Helper()
		testenv.Must(t, err)
	}
	must(unix.Mkfifo(at("fifo"), 0o600))
	must(unix.Mknod(at("device"), unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3)))) // null
	must(os.Symlink(at("absent"), at("dangling")))
	must(os.Symlink(at("loop"), at("loop")))
	must(os.Symlink(at("fifo"), at("link to a fifo")))
	must(os.WriteFile(at("file"), nil, 0o600))
	socket, err := net.Listen("unix", at("socket"))
	must(err)
	t.Cleanup(func() { socket.Close() })
	paths := map[string]string{"namespace of processes": "/proc/self/ns/pid", "directory": dir, "absent": at("absent")}
	for _, name := range []string{"fifo", "device", "dangling", "loop", "link to a fifo", "file", "socket"} {
		paths[name] = at(name)
	}
	return paths
}

// tryAt calls a verb with another CNI_NETNS, and stops it where it waits for something.
func (p *pod) tryAt(t *testing.T, verb, netns string, more ...string) *testenv.Call {
	t.Helper()
	const patience = 30 * time.Second // half of what the plugin has for a lock

	env := p.env(verb)
	env["CNI_NETNS"] = netns
	for _, name := range more {
		env[name] = "1"
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	call, err := p.host.Node.Invoke(ctx, p.host.plugin, env, p.stdin(t))
	testenv.Must(t, err)
	return call
}

// TestNoNamespace calls verbs with files that are no network namespaces, while others hold every lock. ADD and CHECK
// wait for none, and DEL restores nothing there.
func TestNoNamespace(t *testing.T) {
	h := newHost(t)
	chained := h.chainedPod(t)
	chained.add(t)
	p := h.pod(t, "c2", dual("1.1.0"))
	p.add(t)
	before := h.snapshot(t, p.Namespace)
	for name, path := range noNamespaces(t) {
		t.Run(name, func(t *testing.T) {
			for _, held := range []string{record.DefaultDir, loader.Root, filepath.Join(testenv.ReservationDir, "pods", "lock")} {
				lock, err := flock.Acquire(testenv.Context(t), held, flock.Exclusive)
				testenv.Must(t, err)
				defer lock.Release()
			}
			wantError(t, p.tryAt(t, "CHECK", path), codeInvalidNetNS, "CNI_NETNS", path)
			fresh := *p
			fresh.id, fresh.result = "c3", nil
			wantError(t, fresh.tryAt(t, "ADD", path), codeInvalidNetNS, "CNI_NETNS", path)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
	wantSuccess(t, chained.tryAt(t, "DEL", noNamespaces(t)["fifo"]), "")
}

// TestOwnNamespace calls verbs with the plugin's own namespace, which only CNI_NETNS_OVERRIDE allows: a process id in
// CNI_NETNS may be that of another process by now. DEL never fails for it.
func TestOwnNamespace(t *testing.T) {
	const override = "CNI_NETNS_OVERRIDE"
	h := newLoadedHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	p.ifName = "own0"
	before := h.snapshot(t)
	wantError(t, p.tryAt(t, "ADD", h.Node.Path), codeInvalidNetNS, "CNI_NETNS", override)
	h.wantUnchanged(t, before)

	call := p.tryAt(t, "ADD", h.Node.Path, override)
	wantSuccess(t, call, anything)
	p.result = decode(t, call.Stdout).(object)
	link, err := h.Node.Netlink().LinkByName("own0")
	testenv.Must(t, err)
	if got, want := link.Attrs().HardwareAddr.String(), parseResult(t, call.Stdout).Interfaces[1].Mac; got != want {
		t.Errorf("MAC of own0: got %s, want the result's %s", got, want)
	}
	wantSuccess(t, p.tryAt(t, "CHECK", h.Node.Path, override), "")
	wantError(t, p.tryAt(t, "CHECK", h.Node.Path), codeInvalidNetNS, "CNI_NETNS", override)
	other := h.pod(t, "c2", dual("1.1.0"))
	wantPing(t, h.Node, addresses(other.add(t))...)
	wantPing(t, other.Namespace, testenv.OutsideAddr4)
	other.del(t)
	wantSuccess(t, p.tryAt(t, "DEL", h.Node.Path, override), "")
	h.wantUnchanged(t, before)
	wantSuccess(t, p.tryAt(t, "DEL", h.Node.Path), "")
}
