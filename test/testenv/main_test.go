package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
)

// roleEnv makes the test binary run as a program that uses Isolate or Main, instead of running
// its tests.
const roleEnv = "TESTENV_TEST_ROLE"

var roles = map[string]func(m *testing.M){
	"exit": func(*testing.M) {
		Isolate()
		os.Exit(7)
	},
	"panic": func(*testing.M) {
		Isolate()
		mustLeak()
		panic("on purpose")
	},
	"hang": func(*testing.M) {
		Isolate()
		mustLeak()
		// In another session, like a daemon, with the output open.
		sleep := exec.Command("setsid", "sleep", "1000")
		sleep.Stdout = os.Stdout
		if err := sleep.Start(); err != nil {
			fatal(err)
		}
		fmt.Println("ready")
		select {}
	},
	"signal": func(*testing.M) {
		Isolate()
		ch := make(chan os.Signal, 1)
		signal.Notify(ch, unix.SIGTERM)
		fmt.Println("ready")
		fmt.Println(<-ch)
		os.Exit(5)
	},
	"leak": func(m *testing.M) { // with -test.run=TestLeaks
		Isolate()
		os.Exit(run(m, 100*time.Millisecond))
	},
}

func TestMain(m *testing.M) {
	RunInit(func(name string) error { return errors.Join(unix.Sethostname([]byte(name)), OwnDirectories("/opt")) })
	if role := roles[os.Getenv(roleEnv)]; role != nil {
		role(m)
		panic("role returned")
	}
	Main(m)
}

// role returns a command that runs this binary in a role.
func role(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleEnv+"="+name)
	return cmd
}

// mustLeak leaks one of each kind of object.
func mustLeak() {
	err := errors.Join(
		netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "leaked"}, PeerName: "leaked-peer"}),
		os.Mkdir(filepath.Join(bpffsDir, "leaked"), 0o755),
		os.WriteFile("/var/lib/cni/leaked", nil, 0o600),
		os.WriteFile("/run/leaked", nil, 0o600),
	)
	if _, nsErr := newNamespace("leaked"); err != nil || nsErr != nil {
		fatal(errors.Join(err, nsErr))
	}
}

// outside describes the state that must not change when a program isolates itself.
func outside(t *testing.T) string {
	t.Helper()
	now, err := takeSnapshot()
	if err != nil {
		t.Fatal(err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	names := now.minus(nil)
	for _, dir := range []string{"/run", "/var/lib", "/var/lib/cni"} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			names = append(names, filepath.Join(dir, entry.Name()))
		}
	}
	return strings.Join(names, "\n") + "\n" + string(mounts)
}

func TestIsolateLeavesNothing(t *testing.T) {
	for _, tc := range []struct {
		role string
		kill bool
		code int
	}{
		{role: "exit", code: 7},
		{role: "panic", code: 2},
		{role: "hang", kill: true, code: -1},
	} {
		t.Run(tc.role, func(t *testing.T) {
			before := outside(t)
			cmd := role(Context(t), tc.role)
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var stderr strings.Builder
			cmd.Stderr = &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			if tc.kill {
				if _, err := stdout.Read(make([]byte, 16)); err != nil {
					t.Fatalf("program did not start: %v: %s", err, stderr.String())
				}
				if err := cmd.Process.Kill(); err != nil {
					t.Fatal(err)
				}
			}
			cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != tc.code {
				t.Errorf("exit code is %d, want %d; stderr: %s", code, tc.code, stderr.String())
			}
			Eventually(t, "the system as it was", func() error {
				if after := outside(t); after != before {
					return fmt.Errorf("before:\n%s\nafter:\n%s", before, after)
				}
				return nil
			})
		})
	}
}

func TestIsolateRelaysSignals(t *testing.T) {
	cmd := role(Context(t), "signal")
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 64)
	if _, err := stdout.Read(buf); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	n, _ := stdout.Read(buf)
	if got := string(buf[:n]); got != "terminated\n" {
		t.Errorf("program got %q", got)
	}
	cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 5 {
		t.Errorf("exit code is %d, want 5", code)
	}
}

func TestIsolateNeedsRoot(t *testing.T) {
	cmd := exec.Command("setpriv", "--reuid=65534", "--clear-groups", "/proc/self/exe")
	cmd.Args[len(cmd.Args)-1] = copySelf(t)
	cmd.Env = append(os.Environ(), roleEnv+"=exit")
	output, err := cmd.CombinedOutput()
	if err == nil || cmd.ProcessState.ExitCode() != 1 || !strings.Contains(string(output), "need root") {
		t.Errorf("got %v: %s", err, output)
	}
}

// copySelf copies this binary to a place where every user can run it.
func copySelf(t *testing.T) string {
	t.Helper()
	content, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(tempDir, "self")
	if err := os.WriteFile(path, content, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(path) })
	return path
}

func TestIsolatedEnvironment(t *testing.T) {
	handle, err := rtnl.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	links, err := rtnl.Links(handle)
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		if link.Attrs().Flags&unix.IFF_UP != 0 && link.Attrs().Name != "lo" {
			t.Errorf("link %s is up", link.Attrs().Name)
		}
	}
	devices, err := os.ReadDir("/sys/class/net")
	if err != nil || len(devices) != len(links) {
		t.Errorf("/sys shows %v (%v), netlink %d links", devices, err, len(links))
	}
	for dir, want := range map[string]int64{bpffsDir: unix.BPF_FS_MAGIC, "/run": unix.TMPFS_MAGIC, "/var/lib/cni": unix.TMPFS_MAGIC} {
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil || int64(fs.Type) != want {
			t.Errorf("%s is on %#x (%v), want %#x", dir, fs.Type, err, want)
		}
	}
	if !strings.HasPrefix(t.TempDir(), tempDir) {
		t.Errorf("temporary directories are in %s", os.TempDir())
	}
}

// TestLeaks leaks in the role "leak".
func TestLeaks(t *testing.T) {
	if os.Getenv(roleEnv) == "leak" {
		mustLeak()
		if err := exec.Command("sleep", "1000").Start(); err != nil {
			t.Fatal(err)
		}
		return
	}
	cmd := role(Context(t), "leak", "-test.run=^TestLeaks$")
	output, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("exit code is %d, want 1", code)
	}
	for _, leak := range []string{
		"leaked link leaked", "leaked namespace mounted on /run/netns/leaked", "leaked namespace file",
		"leaked pin /sys/fs/bpf/leaked", "leaked descriptor", "leaked process", "sleep 1000",
	} {
		if !strings.Contains(string(output), leak) {
			t.Errorf("no report of %q in\n%s", leak, output)
		}
	}
}

func TestWait(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	cause := errors.New("cause")
	err := Wait(ctx, "nothing", func() error { return cause })
	if !errors.Is(err, cause) || !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	calls := 0
	if err := Wait(t.Context(), "three calls", func() error {
		if calls++; calls < 3 {
			return cause
		}
		return nil
	}); err != nil || calls != 3 {
		t.Errorf("got %v after %d calls", err, calls)
	}
}
