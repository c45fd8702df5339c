package runtimes

import (
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestNewcomer does what the README says on a bare Debian 12 with its containerd: install the package, copy the list,
// and start a container with a host port.
func TestNewcomer(t *testing.T) {
	system, err := filepath.Abs("../../bin/runtimes/debian.tar")
	if err != nil {
		t.Fatal(err)
	}
	debs, err := filepath.Glob("../../bin/release/0.0.0-test/ebpfnet_*_" + runtime.GOARCH + ".deb")
	if err != nil || len(debs) != 1 {
		t.Fatalf("got packages %q, %v; want one: see `make test-runtimes`", debs, err)
	}

	m := startMachine(t, system)
	m.env = []string{"PATH=" + binDir + ":/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"}
	m.install(t, debs[0], "/run/ebpfnet.deb")
	m.run(t, "dpkg", "-i", "/run/ebpfnet.deb")
	m.run(t, "mkdir", "-p", configDir)
	m.run(t, "cp", "/usr/share/doc/ebpfnet/examples/10-ebpfnet.conflist", configDir)
	inDebian := debian
	inDebian.config = strings.Replace(debian.config, "sandbox_image", "cni.bin_dir = '/usr/lib/cni'\nsandbox_image", 1)
	c := startContainerd(t, m, inDebian)
	web := c.publish(t, "web", webServer...)
	m.wantPublished(t)
	for _, line := range strings.Split(m.run(t, "ebpfnetctl", "doctor"), "\n")[1:] {
		if fields := strings.Fields(line); len(fields) < 2 || fields[1] != "good" && fields[0] != "clock" { // nobody sets it
			t.Errorf("doctor: got %s, want good", line)
		}
	}
	c.remove(t, web)
	m.wantNoAttachment(t)
	m.run(t, "dpkg", "--purge", "ebpfnet")
}
