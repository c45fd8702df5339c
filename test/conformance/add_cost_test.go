package conformance

import (
	"fmt"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// forbiddenInADD are system calls that take milliseconds or whose cost grows with the host: loading of
// programs, maps and BTF, reading the kernel's BTF, reading the list of mounts (the Go runtime reads its first
// part once), netlink dumps, iterations over maps (other than uplinks), and execution of other programs.
var forbiddenInADD = []*regexp.Regexp{
	regexp.MustCompile(`BPF_(PROG_LOAD|MAP_CREATE|BTF_LOAD|MAP_GET_NEXT_KEY)`),
	regexp.MustCompile(`/sys/kernel/btf`),
	regexp.MustCompile(`RTM_GET(LINK|ADDR|NEIGH|QDISC|TFILTER|RULE)[^\n]*NLM_F_DUMP`),
	regexp.MustCompile(`(?s)self/mountinfo.*self/mountinfo`),
	regexp.MustCompile(`(?s)BPF_MAP_LOOKUP_BATCH.*BPF_MAP_LOOKUP_BATCH`),
	regexp.MustCompile(`(?s)execve\(.*execve\(`),
}

// TestAddCost traces ADDs on a host with a loaded datapath. They make no expensive call, and as many calls
// beside many containers as beside few.
func TestAddCost(t *testing.T) {
	h := newHost(t)
	withMapping := func(n int) object {
		mapping := object{"hostPort": 7000 + n, "containerPort": 80, "protocol": "tcp"}
		return with(dual("1.1.0"), "runtimeConfig.portMappings", list{mapping})
	}
	trace := filepath.Join(t.TempDir(), "trace")
	traced := func(t *testing.T, n int, conf object) (calls int) {
		h.wrapPlugin(t, fmt.Sprintf(`exec strace -f -qq -o %s -e trace=bpf,sendto,execve,%%file "$1"`, trace))
		h.pod(t, fmt.Sprint("c", n), conf).add(t)
		text := testenv.ReadFile(t, trace)
		for _, bad := range forbiddenInADD {
			if found := bad.Find(text); found != nil {
				t.Errorf("system calls of ADD: got %.100q, want none like %s", found, bad)
			}
		}
		return len(systemCall.FindAll(text, -1))
	}
	few, many := 0, 0
	named := with(dual("1.1.0"), "uplinks", list{testenv.UplinkName})
	h.pod(t, "c1", withMapping(1)).add(t)
	t.Run("few", func(t *testing.T) { few = traced(t, 2, withMapping(2)) })
	for n := 3; n < 30; n++ {
		h.pod(t, fmt.Sprint("c", n), withMapping(n)).add(t)
	}
	t.Run("many", func(t *testing.T) { many = traced(t, 30, withMapping(30)) })
	t.Run("named uplinks", func(t *testing.T) { traced(t, 31, named) })
	if few < 50 || max(few, many)-min(few, many) > 5 { // the kernel may want a few again, or a thread wake another
		t.Errorf("system calls of ADD: %d beside 1 container, %d beside 29; want the same but for a few, and at least 50", few, many)
	}
}
