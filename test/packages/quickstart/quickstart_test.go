// Package quickstart follows the README in a bare Debian, as a new user does: it only copies commands.
//
// Other than all tests beside it, it uses this machine's network, to install what the README names. It is a package of
// its own, since [testenv.Main] would take the network away.
package quickstart

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const repository = "../../.."

// enter makes the Debian in the directory $1 the root of a process with its own mounts and processes, and runs its
// standard input there. Certificates and name servers are this machine's.
const enter = `
root=$1
mount --make-rprivate /
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /sys "$root/sys"
mount -t tmpfs tmpfs "$root/run"
cp -L --parents /etc/resolv.conf /etc/hosts "$root"
cp -r --parents /usr/local/share/ca-certificates "$root"
cp /etc/apt/apt.conf.d/*proxy* "$root/etc/apt/apt.conf.d" 2>/dev/null || true
exec env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TZ=UTC \
	${GOPROXY+GOPROXY="$GOPROXY"} ${HTTPS_PROXY+HTTPS_PROXY="$HTTPS_PROXY"} DEBIAN_FRONTEND=noninteractive \
	chroot "$root" bash -em
`

// isolate gives what follows a network namespace and a bpffs of its own: from here on, commands change the host. The
// network has no way out, so nothing else is downloaded.
const isolate = `
exec unshare --net --mount bash -em <<'ISOLATED'
mount -t sysfs sysfs /sys
mount -t bpf bpf /sys/fs/bpf
ip link set lo up
`

// TestQuickStart runs the commands of README.md in one shell, and wants the pod to answer. Then it does the same with
// the package of cmd/release/README.md. It prints how long a user waits.
func TestQuickStart(t *testing.T) {
	if testing.Short() {
		t.Skip("downloads and builds everything")
	}
	blocks := testenv.Commands(t, repository+"/README.md")
	if len(blocks) != 2 {
		t.Fatalf("README.md: got %d blocks of commands, want how to install and how to test", len(blocks))
	}
	root := unpack(t)
	run := func(script string) string { return inDebian(t, root, "cd /root/ebpfnet\n"+script) }
	goTool, try, _ := strings.Cut(blocks[1], "\n") // the only line of the second block that downloads something
	const clock = `echo $(($(date +%s) - start)) seconds to `
	output := run("export start=$(date +%s)\n" + blocks[0] + clock + "install\n" + goTool + "\n" + isolate + try + clock + "an answer\nISOLATED\n")
	t.Log(strings.Join(regexp.MustCompile(`(?m)^\d+ seconds to .*$`).FindAllString(output, -1), ", "))
	if listings := strings.Count(output, "Directory listing for /"); listings < 4 { // twice in each
		t.Errorf("README.md: got %d lines of listings, want an answer on both families:\n%s", listings, output)
	}
	if after := inDebian(t, root, "cd /root/ebpfnet && make uninstall && command -v ebpfnetctl || echo removed"); !strings.Contains(after, "removed\n") {
		t.Errorf("make uninstall: got %s", after)
	}
	for _, block := range testenv.Commands(t, repository+"/cmd/release/README.md") {
		if output := run(block); !strings.Contains(output, "forwarding") {
			t.Errorf("cmd/release/README.md: got %s, want what doctor says", output)
		}
	}
}

// unpack returns a directory with a bare Debian and a clone of this repository.
func unpack(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for _, args := range [][]string{
		{"tar", "-C", root, "--exclude=./dev/*", "-xf", repository + "/bin/packages/debian.tar"},
		{"git", "clone", "--quiet", repository, root + "/root/ebpfnet"},
	} {
		if output, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%q: %v: %s", args, err, output)
		}
	}
	return root
}

// inDebian runs a script, with the commands that it prints, and returns the output of both.
func inDebian(t *testing.T, root, script string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-euc", enter, "bash", root)
	cmd.Stdin = strings.NewReader(script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	output, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v:\n%s", err, fmt.Sprintf("%s\n%s", script, output))
	}
	return string(output)
}
