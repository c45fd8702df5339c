package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
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
	"leak": func(m *testing.M) { // with -test.run=TestLeaks
		Isolate()
		os.Exit(run(m, 100*time.Millisecond))
	},
}

func TestMain(m *testing.M) {
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
	Must(t, err)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	Must(t, err)
	names := now.minus(nil)
	for _, dir := range []string{"/run", "/var/lib", "/var/lib/cni"} {
		entries, err := os.ReadDir(dir)
		Must(t, err)
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
			Must(t, err)
			var stderr strings.Builder
			cmd.Stderr = &stderr
			Must(t, cmd.Start())
			if tc.kill {
				if _, err := stdout.Read(make([]byte, 16)); err != nil {
					t.Fatalf("program did not start: %v: %s", err, stderr.String())
				}
				Must(t, cmd.Process.Kill())
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

// TestLeaks leaks in the role "leak".
func TestLeaks(t *testing.T) {
	if os.Getenv(roleEnv) == "leak" {
		mustLeak()
		Must(t, exec.Command("sleep", "1000").Start())
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
