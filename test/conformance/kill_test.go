package conformance

import (
	"fmt"
	"os/exec"
	"testing"
)

// changing are the system calls by which ADD, DEL and GC change something.
var changing = []string{"bpf", "sendto", "sendmsg", "openat", "write", "linkat", "symlinkat", "renameat", "unlinkat", "unlink", "mkdirat", "utimensat", "setxattr", "fsetxattr", "flock", "close"}

// killing makes the plugin one that is killed when a thread of it begins a system call for the nth time.
func (h *host) killing(t *testing.T, call string, n int) {
	t.Helper()
	h.through(t, killAt(call, n))
}

// killAt is a line of shell for [wrapped].
func killAt(call string, n int) string {
	return fmt.Sprintf(`exec strace -f -qq -o /dev/null -e trace=%s -e inject=%s:signal=KILL:when=%d "$1"`, call, call, n)
}

// killed is the exit code of a plugin that a signal ended, or of a shell that says so.
func killed(exit int) bool { return exit == -1 || exit == 137 }

// TestKilled kills ADD, DEL and GC at each of their system calls that change something, one after the
// other. Then a DEL, or an ADD and a DEL, leaves what was there before; another container never
// notices.
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
	before := h.state(t, p.Namespace, other.Namespace)

	for _, verb := range []string{"ADD", "DEL", "GC"} {
		for _, call := range changing {
			kills := 0
			for n := 1; ; n++ {
				if verb != "ADD" {
					p.add(t)
				}
				survived := false
				t.Run(fmt.Sprintf("%s, %s %d", verb, call, n), func(t *testing.T) {
					h.killing(t, call, n)
					if verb == "GC" {
						survived = !killed(h.tryGC(t, withKey(dual("1.1.0"), currentKey, attachments("other"))).Exit)
					} else {
						survived = !killed(p.try(t, verb).Exit)
					}
				})
				if verb == "ADD" && n%2 == 0 && !survived { // the runtime tries again, on the same or on a new container
					if retry := p.try(t, "ADD"); retry.Exit != 0 {
						p.del(t)
						p.add(t)
					}
				}
				p.del(t)
				h.waitState(t, before, p.Namespace, other.Namespace)
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
