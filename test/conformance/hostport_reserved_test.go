package conformance

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// conmonEnv makes this binary a process that keeps its sockets, as conmon does. conmon's arguments are not those of
// any other program.
const conmonEnv = "EBPFNET_TEST_CONMON"

func runAsConmon() int {
	io.Copy(io.Discard, os.Stdin)
	return 0
}

// TestHostPortReserved requests a host port that a process has bound which says that it is the container's conmon.
// Unlike the runtime in TestHostPortHeldByRuntime, it is no ancestor of the plugin.
func TestHostPortReserved(t *testing.T) {
	const nobody = 65534

	type process struct {
		name string // of the executable
		args []string
		file func(path string) error // changes the executable
		attr syscall.SysProcAttr
	}
	rootOnly := []syscall.SysProcIDMap{{Size: 1}}
	h := newLoadedHost(t)
	for _, test := range []struct {
		what    string
		process process
		granted bool
	}{
		{"conmon of the container", process{}, true},
		{"conmon that was upgraded", process{file: os.Remove}, true},
		{"conmon of another container", process{args: []string{"-c", "c12"}}, false},
		{"conmon of nothing", process{args: []string{"-c"}}, false},
		{"conmon with another argument", process{args: []string{"-c", "c2", "-n", "c1", "-c", "c1"}}, false},
		{"another program", process{name: "conmon.sh"}, false},
		{"a user's process", process{attr: syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody}}}, false},
		{"a user's executable", process{file: func(path string) error { return os.Chown(path, nobody, 0) }}, false},
		{"a group's executable", process{file: func(path string) error { return os.Chmod(path, 0o775) }}, false},
		{"everyone's executable", process{file: func(path string) error { return os.Chmod(path, 0o757) }}, false},
		{"mounts of its own", process{attr: syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}}, false},
		{"processes of its own", process{attr: syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}}, false},
		{"users of its own", process{attr: syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: rootOnly, GidMappings: rootOnly}}, false},
	} {
		t.Run(test.what, func(t *testing.T) {
			name, args := "conmon", []string{"--api-version", "1", "-c", "c1", "-u", "c1"}
			if test.process.name != "" {
				name = test.process.name
			}
			if test.process.args != nil {
				args = test.process.args
			}
			cmd := exec.CommandContext(testenv.Context(t), copyOfThis(t, name), args...)
			cmd.Args[0] = "conmon"
			cmd.Env = append(os.Environ(), conmonEnv+"=1")
			cmd.SysProcAttr = &test.process.attr
			pid := keepPort(t, cmd, bindPort(t, h.Node, "tcp", netip.MustParseAddrPort("[::]:8080")))
			if test.process.file != nil {
				testenv.Must(t, test.process.file(cmd.Path))
			}
			p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{object{"hostPort": 8080, "containerPort": 80}}))
			before := h.snapshot(t, p.Namespace)
			if test.granted {
				p.add(t)
				p.del(t)
			} else {
				wantError(t, p.try(t, "ADD"), cnierr.CodePortTaken, ":8080/tcp", fmt.Sprintf("(pid %d)", pid))
			}
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestHostPortReservedForOne reserves the port at one address. A process that serves it at another is a conflict all the
// same, unless only the first is requested.
func TestHostPortReservedForOne(t *testing.T) {
	h := newLoadedHost(t)
	for _, test := range []struct{ reserved, network, served, message string }{
		{"0.0.0.0", "tcp6", "::", "[::]:8080/tcp"}, // podman reserves IPv4 alone
		{"127.0.0.1", "tcp", "192.0.2.1", "0.0.0.0:8080/tcp"},
		{"192.0.2.1", "tcp", "127.0.0.1", "0.0.0.0:8080/tcp"},
	} {
		t.Run(test.reserved+" and "+test.served, func(t *testing.T) {
			at := func(addr string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(addr), 8080) }
			request := func(hostIP string) (*pod, testenv.Snapshot) {
				p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
					object{"hostPort": 8080, "containerPort": 80, "hostIP": hostIP},
				}))
				return p, h.snapshot(t, p.Namespace)
			}
			defer bindPort(t, h.Node, "tcp", at(test.reserved)).Close()
			pid := bindPortInProcess(t, h.Node, test.network, at(test.served))

			p, before := request("")
			wantError(t, p.try(t, "ADD"), cnierr.CodePortTaken, test.message, fmt.Sprintf("cat (pid %d)", pid))
			h.wantUnchanged(t, before, p.Namespace)

			p, before = request(test.reserved)
			p.add(t)
			p.del(t)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// copyOfThis copies this binary, which can then have any owner.
func copyOfThis(t *testing.T, name string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	testenv.Must(t, os.Chmod(filepath.Dir(filepath.Dir(path)), 0o755)) // for any user
	testenv.Must(t, os.WriteFile(path, testenv.ReadFile(t, "/proc/self/exe"), 0o755))
	return path
}
