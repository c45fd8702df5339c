package conformance

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Hosts with an unusual setup.

// readOnly makes a directory read-only until the end of the test.
func readOnly(t *testing.T, dir string) {
	t.Helper()
	testenv.Mount(t, dir, dir, "", unix.MS_BIND, "")
	testenv.Must(t, unix.Mount("", dir, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""))
}

// wantSetupError wants ADD and STATUS to fail with the same words, and ADD to leave nothing.
func (h *host) wantSetupError(t *testing.T, p *pod, code uint, words ...string) {
	t.Helper()
	before := h.snapshot(t, p.Namespace)
	wantError(t, p.try(t, "ADD"), code, words...)
	h.wantUnchanged(t, before, p.Namespace)
	wantError(t, h.status(t, p.conf), codeNotAvailable, words...)
	h.wantUnchanged(t, before, p.Namespace)
	wantSuccess(t, p.try(t, "DEL"), "")
}

// TestBPFFSNotMounted runs on a host without a mounted bpffs: the plugin mounts it.
func TestBPFFSNotMounted(t *testing.T) {
	h := newLoadingHost(t)
	testenv.Must(t, unix.Unmount("/sys/fs/bpf", 0))
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
	p.del(t)
}

// TestForeignPins checks that the pins of other tools stay.
func TestForeignPins(t *testing.T) {
	h := newHost(t)
	const pins = 200
	dir := "/sys/fs/bpf/foreign"
	testenv.Must(t, os.Mkdir(dir, 0o700))
	defer os.RemoveAll(dir)
	testenv.Must(t, rlimit.RemoveMemlock()) // before Linux 5.11
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	testenv.Must(t, err)
	defer m.Close()
	for i := range pins {
		clone, err := m.Clone()
		testenv.Must(t, err)
		err = clone.Pin(filepath.Join(dir, fmt.Sprintf("endpoints%d", i)))
		clone.Close()
		testenv.Must(t, err)
	}
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	wantSuccess(t, p.try(t, "CHECK"), "")
	p.del(t)
	h.gc(t, dual("1.1.0"))
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != pins {
		t.Errorf("foreign pins: got %d (%v), want %d", len(files), err, pins)
	}
}

// TestForeignDirectory has a pinned map at the path of the directory of pins.
func TestForeignDirectory(t *testing.T) {
	h := newHost(t)
	testenv.Must(t, os.RemoveAll(loader.Root))
	testenv.Must(t, rlimit.RemoveMemlock()) // before Linux 5.11
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1})
	testenv.Must(t, err)
	defer m.Close()
	testenv.Must(t, m.Pin(loader.Root))
	p := h.pod(t, "c1", dual("1.1.0"))
	wantError(t, p.try(t, "ADD"), codeIO, loader.Root)
	wantError(t, h.status(t, p.conf), codeNotAvailable, loader.Root)
	testenv.Must(t, os.Remove(loader.Root))
}

// TestNoBTF hides the kernel's BTF, which the datapath does not need.
func TestNoBTF(t *testing.T) {
	h := newLoadingHost(t)
	if _, err := os.Stat("/sys/kernel/btf"); err == nil {
		testenv.Mount(t, "none", "/sys/kernel/btf", "tmpfs", 0, "")
	}
	p := h.pod(t, "c1", dual("1.1.0"))
	p.add(t)
	wantPing(t, p.Namespace, testenv.OutsideAddr4)
	p.del(t)
}

// TestMissingCapabilities runs the plugin without some capabilities.
func TestMissingCapabilities(t *testing.T) {
	if _, err := exec.LookPath("setpriv"); err != nil {
		t.Fatal("setpriv is missing: apt-get install util-linux")
	}
	h := newLoadingHost(t)
	built := h.plugin
	for _, test := range []struct {
		drop  string
		words []string
	}{
		{"-bpf,-sys_admin", []string{"CAP_SYS_ADMIN"}},
		{"-net_admin", []string{"CAP_NET_ADMIN"}},
		{"-all", []string{"CAP_"}},
	} {
		t.Run(test.drop, func(t *testing.T) {
			h.plugin = filepath.Join(t.TempDir(), "ebpfnet")
			script := fmt.Sprintf("#!/bin/sh\nexec setpriv --bounding-set=%s --inh-caps=%s %s\n", test.drop, test.drop, built)
			testenv.Must(t, os.WriteFile(h.plugin, []byte(script), 0o755))
			defer func() { h.plugin = built }()
			p := h.pod(t, "c1", dual("1.1.0"))
			before := h.snapshot(t, p.Namespace)
			wantError(t, p.try(t, "ADD"), cnierr.CodeNotSupported, test.words...)
			h.wantUnchanged(t, before, p.Namespace)
			wantError(t, h.status(t, p.conf), codeNotAvailable, test.words...)
		})
	}
	p := h.pod(t, "c2", dual("1.1.0"))
	p.add(t)
	p.del(t)
}

// TestReadOnlySysctls makes sysctls read-only: ADD succeeds if they have the right values.
func TestReadOnlySysctls(t *testing.T) {
	h := newLoadedHost(t) // sets the sysctls
	p := h.pod(t, "c1", dual("1.1.0"))
	t.Run("right values", func(t *testing.T) {
		readOnly(t, "/proc/sys")
		p.add(t)
		wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
		p.del(t)
	})
	for _, f := range testenv.Families {
		name := f.Forwarding
		t.Run(name, func(t *testing.T) {
			testenv.Must(t, h.Node.SetSysctl(name, "0"))
			t.Cleanup(func() {
				testenv.NoError(t, h.Node.SetSysctl(name, "1"))
			})
			readOnly(t, "/proc/sys")
			before := h.snapshot(t, p.Namespace)
			wantError(t, p.try(t, "ADD"), codeIO, filepath.Join("/proc/sys", name), "1", "read-only")
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestIPv6Disabled disables IPv6 on the host. IPv4 works, and the error for a network with both names the sysctl.
func TestIPv6Disabled(t *testing.T) {
	h := newLoadingHost(t)
	for _, name := range []string{"net/ipv6/conf/all/disable_ipv6", "net/ipv6/conf/default/disable_ipv6"} {
		testenv.Must(t, h.Node.SetSysctl(name, "1"))
	}
	p := h.pod(t, "c1", single("1.1.0"))
	p.add(t)
	wantPing(t, p.Namespace, testenv.OutsideAddr4)
	p.del(t)

	p.conf = dual("1.1.0")
	h.wantSetupError(t, p, cnierr.CodeNotSupported, "IPv6", "disable_ipv6")
}

// TestUnwritableDataDir uses directories for reservations that cannot be written to.
func TestUnwritableDataDir(t *testing.T) {
	h := newLoadedHost(t)
	for _, test := range []struct {
		name string
		make func(t *testing.T, dir string)
		word string
	}{
		{"read-only", readOnly, "read-only file system"},
		{"full", func(t *testing.T, dir string) {
			testenv.Mount(t, "none", dir, "tmpfs", 0, "size=4k")
			testenv.Must(t, os.WriteFile(filepath.Join(dir, "other"), []byte(strings.Repeat("x", 4096)), 0o600))
		}, "no space left"},
		{"without inodes", func(t *testing.T, dir string) { testenv.Mount(t, "none", dir, "tmpfs", 0, "nr_inodes=1") }, "no space left"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			test.make(t, dir)
			h.wantSetupError(t, h.pod(t, "c1", with(dual("1.1.0"), "ipam.dataDir", dir)), codeIO, dir, test.word)
		})
	}
}

// TestUnwritableRecordDir is the same for records. Only containers that need one are affected.
func TestUnwritableRecordDir(t *testing.T) {
	h := newHost(t)
	dir := privateDir(t)
	readOnly(t, dir)
	p := h.pod(t, "c1", with(dual("1.1.0"), "dataDir", dir))
	p.add(t)
	p.del(t)
	p.conf = with(p.conf, "runtimeConfig.aliases", list{"web"})
	before := h.snapshot(t, p.Namespace)
	wantError(t, p.try(t, "ADD"), codeIO, dir, "read-only file system")
	h.wantUnchanged(t, before, p.Namespace)
}

// TestOpenDataDir uses directories for records that others than root can open, and so lock.
func TestOpenDataDir(t *testing.T) {
	h := newLoadedHost(t)
	for name, change := range map[string]func(dir string) error{
		"mode 0755":     func(dir string) error { return os.Chmod(dir, 0o755) },
		"another user":  func(dir string) error { return os.Chown(dir, 1000, 0) },
		"mode 1777":     func(dir string) error { return os.Chmod(dir, os.ModeSticky|0o777) },
		"another group": func(dir string) error { return os.Chmod(dir, 0o750) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := privateDir(t)
			p := h.pod(t, "c1", with(dual("1.1.0"), "dataDir", dir))
			p.add(t)
			p.del(t)
			testenv.Must(t, change(dir))
			h.wantSetupError(t, p, codeInvalidConfig, "dataDir", dir, "chmod 0700")
		})
	}
}

// privateDir returns a directory for records.
func privateDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	testenv.Must(t, os.Chmod(dir, 0o700))
	return dir
}
