package prog

import (
	"errors"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestReplyPorts has a pod's port that no remote has opened a flow to: what the pod sends from it is masqueraded, without a
// lookup of the flow. A flow that the programs create marks the port, and replies of the next one find their flow.
func TestReplyPorts(t *testing.T) {
	h := newHost(t)
	eachScene(t, withPorts, func(t *testing.T, s scene) {
		marks := h.programs.Maps[bpf.MapPortMarks]
		testenv.Must(t, errors.Join(h.reset(), h.fill(s, []hostPort{{host: "any:8080", to: "pod:80"}}, nil)))
		for word := range uint32(2 * wordsPerMark) { // TCP's and UDP's of bpf.PortReplies
			testenv.Must(t, marks.Put(word, uint64(0)))
		}
		sends := func(out string) {
			t.Helper()
			key, value := dnat("remote:5000", "pod:80", "node:8080").with(replied).wire(s)
			testenv.Must(t, errors.Join(h.flows().Put(key, value), h.emptyForwardingCache()))
			p := s.packet("pod:80 > remote:5000", false)
			isSegment(&p)
			if _, err := h.hop(&s, p, false, hop{program: bpf.ProgToUplink, out: out}); err != nil {
				t.Error(err)
			}
		}
		sends("node:* > remote:5000")
		opening := s.packet("remote2:5000 > node:8080", false)
		if _, err := h.hop(&s, opening, false, hop{program: bpf.ProgFromUplink, out: "remote2:5000 > pod:80"}); err != nil {
			t.Error(err)
		}
		sends("node:8080 > remote:5000")
	})
}
