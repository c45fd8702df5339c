package scenario

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Rules like those of kube-proxy, in each of its modes, are switched on and off while connections of all kinds exchange
// packets. No packet is lost.
func TestFastPathAutoUnderTraffic(t *testing.T) {
	n := newAutoNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	load := n.startTraffic(t, a, web)
	for _, row := range hookRows {
		t.Run(row.name, func(t *testing.T) {
			row.require(t)
			wantNoneResent := n.countResent(t, a, web)
			for _, commands := range []string{row.on, row.off} {
				n.sh(t, commands)
				// Then cached decisions are over, 200 ms at 4 ms a request, and connections are offloaded again.
				for range 50 + testenv.OffloadRequests {
					load.awaitRound(t)
				}
			}
			wantNoneResent()
		})
		if t.Failed() {
			break // its rules may be left
		}
	}
	load.stop()
}
