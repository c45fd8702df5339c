package scenario

import (
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Rules that let a container only open connections, or only answer, drop nothing of a transfer, which begins in the
// stack and goes on past it.
func TestTransfersUnderOneSidedPolicies(t *testing.T) {
	for _, fastPath := range []string{"never", "established", "auto"} {
		t.Run(fastPath, func(t *testing.T) {
			keys := fmt.Sprintf(`"ipMasq": true, "fastPath": %q, `, fastPath)
			n := newNetworkWith(t, withKeys(`"ipMasq": true`))
			opens := n.addWith(t, "opens", keys+`"policy": {"ingress": [], "egress": [{}]}`, nil)
			answers := n.addWith(t, "answers", keys+`"policy": {"ingress": [{}], "egress": []}`, mapBoth(8080, 80))
			size := sizeOf(8 * mebibyte)
			for _, f := range testenv.Families {
				for _, p := range n.routedPaths(t, f, opens, answers) {
					t.Run(f.Name+"/"+p.name, func(t *testing.T) {
						upload(size)(t, p.client, p.server, p.listen, p.dial)
						download(size)(t, p.client, p.server, p.listen, p.dial)
						for _, pod := range []*testenv.Pod{opens, answers} {
							dropped := n.dropsOf(t, pod)
							if dropped[reasonPolicy]+dropped[reasonPolicyEgress] > 0 {
								t.Errorf("%s: got drops %v, want none", pod.Name, dropped)
							}
						}
					})
				}
			}
		})
	}
}
