package prog

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestHostKeepsItsPort has a connection of the host that was moved to port 20000, of whose two
// entries one is lost, or has become another's.
func TestHostKeepsItsPort(t *testing.T) {
	const sent = "node:5000 > remote:80"
	pods := out("remote:80", "node:5000", "pod:4000").unused(10 * time.Second)
	theirs := out("remote:80", "node:20000", "pod2:5000").unused(10 * time.Second)
	replies := out("remote:80", "node:20000", "node:5000")
	keeps := in("remote:80", "node:5000", "node:20000")
	runRows(t, bpf.ProgToUplink, []row{
		{
			name: "a: a pod has got the port", on: ported, flows: []flow{pods, theirs, keeps}, in: sent, out: "node:* > remote:80",
			after: []flow{pods, theirs, out("remote:80", "node:*", "node:5000"), in("remote:80", "node:5000", "node:*").state(replied)},
		},
		{
			name: "b: the entry for the replies is lost", on: ported, flows: []flow{pods, keeps}, in: sent, out: "node:20000 > remote:80",
			after: []flow{pods, replies, keeps.state(replied)},
		},
		{
			name: "c: sending alone keeps the port", on: ported, flows: []flow{pods, replies.unused(10 * time.Second), keeps}, in: sent, out: "node:20000 > remote:80",
			after: []flow{pods, replies, keeps.state(replied)},
		},
	})
}
