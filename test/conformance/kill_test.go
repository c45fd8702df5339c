package conformance

import (
	"fmt"
	"os/exec"
	"testing"
)

// mutatingCalls are the system calls with which ADD, DEL and GC change something.
var mutatingCalls = []string{"bpf", "sendto", "sendmsg", "openat", "write", "linkat", "symlinkat", "renameat", "unlinkat", "unlink", "mkdirat", "utimensat", "setxattr", "fsetxattr", "flock", "close"}

// killPluginAt has the plugin killed when one of its threads enters a system call for the nth time.
func (h *host) killPluginAt(t *testing.T, call string, n int) {
	t.Helper()
	h.wrapPlugin(t, killAt(call, n))
}

// killAt returns a shell command for [wrapped].
func killAt(call string, n int) string {
	return fmt.Sprintf(`exec strace -f -qq -o /dev/null -e trace=%s -e inject=%s:signal=KILL:when=%d "$1"`, call, call, n)
}

// killStep returns the distance of the system calls at which to kill: without -long, of many alike some do.
func killStep() int {
	if *long {
		return 1
	}
	return 3
}

// killed reports whether the exit code, a plugin's or a shell's, means SIGKILL.
func killed(exit int) bool { return exit == -1 || exit == 137 }

// TestKilled kills ADD, DEL and GC at system calls that change something. DEL, or ADD and DEL, then removes all
// traces, and another container is never affected.
func TestKilled(t *testing.T) {
	if _, err := exec.LookPath("strace"); err != nil {
		t.Fatal("strace is missing: apt-get install strace")
	}
	h := newHost(t)
	conf := withPort(with(with(dual("1.1.0"), "nonMasqueradeCIDRs", list{"10.0.0.0/8"}), "runtimeConfig.aliases", list{"web"}), 8080)
	other := h.pod(t, "other", with(dual("1.1.0"), "nonMasqueradeCIDRs", list{"10.0.0.0/8"}))
	other.add(t)
	p := h.pod(t, "c1", conf)
	p.add(t)
	p.del(t)
	before := h.snapshot(t, p.Namespace, other.Namespace)

	for _, verb := range []string{"ADD", "DEL", "GC"} {
		for _, call := range mutatingCalls {
			kills := 0
			for n := 1; ; n += killStep() {
				if verb != "ADD" {
					p.add(t)
				}
				survived := false
				t.Run(fmt.Sprintf("%s, %s %d", verb, call, n), func(t *testing.T) {
					h.killPluginAt(t, call, n)
					if verb == "GC" {
						survived = !killed(h.tryGC(t, withKey(dual("1.1.0"), currentKey, attachments("other"))).Exit)
					} else {
						survived = !killed(p.try(t, verb).Exit)
					}
				})
				if verb == "ADD" && kills%2 == 1 && !survived { // the runtime retries, with the same or a new container
					if retry := p.try(t, "ADD"); retry.Exit != 0 {
						p.del(t)
						p.add(t)
					}
				}
				p.del(t)
				h.waitUnchanged(t, before, p.Namespace, other.Namespace)
				if survived || t.Failed() {
					break
				}
				kills++
			}
			t.Logf("%s was killed at %d calls of %s", verb, kills, call)
		}
	}
	wantSuccess(t, other.try(t, "CHECK"), "")
}
