package conformance

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// notInADD is what takes milliseconds, or the longer the more a host has: programs, maps and BTF that
// are loaded, the kernel's BTF, the list of all mounts (the Go runtime reads the begin of it, once),
// lists of devices and the like, maps that are walked over (but that of the uplinks), other processes.
var notInADD = []*regexp.Regexp{
	regexp.MustCompile(`BPF_(PROG_LOAD|MAP_CREATE|BTF_LOAD|MAP_GET_NEXT_KEY)`),
	regexp.MustCompile(`/sys/kernel/btf`),
	regexp.MustCompile(`RTM_GET(LINK|ADDR|NEIGH|QDISC|TFILTER)[^\n]*NLM_F_DUMP`),
	regexp.MustCompile(`(?s)self/mountinfo.*self/mountinfo`),
	regexp.MustCompile(`(?s)BPF_MAP_LOOKUP_BATCH.*BPF_MAP_LOOKUP_BATCH`),
	regexp.MustCompile(`(?s)execve\(.*execve\(`),
}

// TestAddCost traces ADDs on a host where the datapath runs. One does nothing that takes long, and
// as much beside many containers as beside few.
func TestAddCost(t *testing.T) {
	h := newHost(t)
	ported := func(n int) object {
		mapping := object{"hostPort": 7000 + n, "containerPort": 80, "protocol": "tcp"}
		return with(dual("1.1.0"), "runtimeConfig.portMappings", list{mapping})
	}
	trace := filepath.Join(t.TempDir(), "trace")
	traced := func(t *testing.T, n int) (calls int) {
		h.through(t, fmt.Sprintf(`exec strace -f -qq -o %s -e trace=bpf,sendto,execve,%%file "$1"`, trace))
		h.pod(t, fmt.Sprint("c", n), ported(n)).add(t)
		text, err := os.ReadFile(trace)
		if err != nil {
			t.Fatal(err)
		}
		for _, bad := range notInADD {
			if found := bad.Find(text); found != nil {
				t.Errorf("%s: found %.100q", bad, found)
			}
		}
		return strings.Count(string(text), "(")
	}
	few, many := 0, 0
	h.pod(t, "c1", ported(1)).add(t)
	t.Run("few", func(t *testing.T) { few = traced(t, 2) })
	for n := 3; n < 30; n++ {
		h.pod(t, fmt.Sprint("c", n), ported(n)).add(t)
	}
	t.Run("many", func(t *testing.T) { many = traced(t, 30) })
	if few < 50 || many != few {
		t.Errorf("%d system calls beside one container, %d beside 29", few, many)
	}
}
