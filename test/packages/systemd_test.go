package packages

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	unitDir   = "/etc/systemd/system/"
	collected = "/var/lib/prometheus/node-exporter"
)

// TestSystemd boots a host where the units are enabled. They load the datapath and write metrics again and again. The
// hooks of udev, networkd-dispatcher and NetworkManager attach programs to devices that come later.
func TestSystemd(t *testing.T) {
	h := newHost(t)
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	h.run(t, []string{"mkdir", "-p", collected})
	h.run(t, []string{"systemctl", "enable", "ebpfnet-load.service", "ebpfnet-metrics.timer", "systemd-networkd", "networkd-dispatcher"})
	h.run(t, []string{"systemctl", "disable", "NetworkManager"})
	h.write(t, "/etc/NetworkManager/NetworkManager.conf", networkManagerConfig)
	h.write(t, unitDir+"ebpfnet-metrics.timer.d/often.conf", "[Timer]\nOnUnitActiveSec=3s\nAccuracySec=100ms\n")
	h.write(t, unitDir+"ebpfnet-metrics.service.d/file.conf", "[Service]\nEnvironment=TEXTFILE="+collected+"/other.prom\n")
	h.write(t, "/etc/systemd/network/wan1.network", "[Match]\nName=wan1\n[Network]\nAddress=203.0.113.9/24\n")
	b := h.boot(t)

	b.await(t, "active", "systemctl", "is-active", "ebpfnet-load.service")
	b.await(t, "programs", "ebpfnetctl", "status")
	for range 2 {
		b.await(t, "ebpfnet_datapath_loaded 1", "cat", collected+"/other.prom")
		b.await(t, "", "rm", collected+"/other.prom")
	}

	example := string(testenv.ReadFile(t, h.root+"/usr/share/doc/ebpfnet/examples/10-ebpfnet.conflist"))
	conflist := strings.Replace(example, `"ipMasq": true`, `"ipMasq": true, "uplinks": ["`+testenv.UplinkName+`", "wan*"]`, 1)
	testenv.NewRuntime(t, h.Node, []byte(conflist), h.root+pluginsOfDebian).AddPod(t, "web", nil)
	b.await(t, "", "udevadm", "control", "--ping")
	h.ip(t, "link", "add", "wan0", "type", "veth", "peer", "name", "veth0")
	b.await(t, "wan0", "ebpfnetctl", "status")

	b.await(t, "active", "systemctl", "is-active", "networkd-dispatcher")
	b.await(t, "", "sh", "-c", "rm /usr/lib/udev/rules.d/90-ebpfnet.rules && udevadm control --reload") // else it would be first
	h.ip(t, "link", "add", "wan1", "type", "veth", "peer", "name", "veth1")
	h.ip(t, "link", "set", "veth1", "up")
	b.await(t, "wan1", "ebpfnetctl", "status")

	h.useNetworkManager(t, b)
}

// booted is a host with systemd as its first process, in namespaces of its own.
type booted struct{ pid int }

// bootScript makes the mounts of a booted host in $1, whose cgroups are those below $2. Of sysctls only those of its
// network can be written.
const bootScript = `
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir "/sys/fs/cgroup/$2"
echo 0 >"/sys/fs/cgroup/$2/cgroup.procs"
exec unshare --cgroup --uts --ipc sh -ec '
	mount -t proc proc "$1/proc"
	mount --bind "$1/proc/sys" "$1/proc/sys"
	mount --bind "$1/proc/sys/net" "$1/proc/sys/net"
	mount -o remount,bind,ro "$1/proc/sys"
	mount -t sysfs sysfs "$1/sys" # with the devices of its network
	mount --bind /sys/fs/bpf "$1/sys/fs/bpf"
	mount -t cgroup2 cgroup2 "$1/sys/fs/cgroup"
	mount -t tmpfs tmpfs "$1/dev"
	for device in null zero full random urandom tty; do
		touch "$1/dev/$device"
		mount --bind "/dev/$device" "$1/dev/$device"
	done
	mkdir -m 0700 /run/ebpfnet
	mount -t tmpfs tmpfs "$1/run"
	mkdir "$1/run/ebpfnet"
	mount --bind /run/ebpfnet "$1/run/ebpfnet"
	exec env -i container=test PATH=/usr/sbin:/usr/bin chroot "$1" /lib/systemd/systemd' sh "$1" "$2"
`

// boot starts systemd. What would reach beyond the host's namespaces is off: rules and events of other devices, modules
// and sysctls.
func (h *host) boot(t *testing.T) *booted {
	t.Helper()
	h.run(t, []string{"systemctl", "mask", "systemd-udev-trigger", "systemd-modules-load", "systemd-sysctl"})
	h.run(t, []string{"find", "/usr/lib/udev/rules.d", "-type", "f", "!", "-name", "90-ebpfnet.rules", "-delete"})
	cgroup := "ebpfnet-" + rand.Text()
	systemd := exec.Command("sh", "-ec", bootScript, "sh", h.root, cgroup)
	systemd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	var output strings.Builder
	systemd.Stdout, systemd.Stderr = &output, &output
	testenv.Must(t, h.Node.Do(systemd.Start))
	b := &booted{systemd.Process.Pid}
	t.Cleanup(func() {
		if t.Failed() {
			journal, _ := b.try(t, "journalctl", "--no-pager", "--no-hostname")
			t.Logf("journal: %s%s", &output, journal)
		}
		_ = systemd.Process.Kill() // and all others of its namespace
		_ = systemd.Wait()
		const remove = `mount -t cgroup2 cgroup2 /sys/fs/cgroup && find "/sys/fs/cgroup/$1" -depth -type d -exec rmdir {} +`
		if out, err := exec.Command("unshare", "--mount", "sh", "-c", remove, "sh", cgroup).CombinedOutput(); err != nil {
			t.Errorf("remove the cgroups: %v: %s", err, out)
		}
	})
	return b
}

// try runs a command on the booted host and returns what it prints.
func (b *booted) try(t *testing.T, command ...string) (output string, err error) {
	enter := []string{"--target", fmt.Sprint(b.pid), "--mount", "--net", "--pid", "--cgroup", "--root", "--wd", "--"}
	out, err := exec.CommandContext(testenv.Context(t), "nsenter", append(enter, command...)...).CombinedOutput()
	return string(out), err
}

// await wants a command to succeed at some time, and to print a word.
func (b *booted) await(t *testing.T, word string, command ...string) {
	t.Helper()
	testenv.Eventually(t, fmt.Sprintf("%q of %q", word, command), func() error {
		output, err := b.try(t, command...)
		if err == nil && strings.Contains(output, word) {
			return nil
		}
		return fmt.Errorf("%v: %s", err, output)
	})
}

// write writes a file of the host.
func (h *host) write(t *testing.T, file, content string) {
	t.Helper()
	path := h.root + file
	testenv.Must(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)))
}

// ip runs the command ip in the node's network.
func (h *host) ip(t *testing.T, args ...string) {
	t.Helper()
	if _, err := h.Node.Run(testenv.Context(t), "ip", args...); err != nil {
		t.Fatal(err)
	}
}
