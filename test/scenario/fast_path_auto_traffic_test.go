package scenario

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

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
			testenv.NoError(t, load.Lossless(t, func(int) error {
				noneResent := n.countResent(t, a, web)
				var lost [2]error
				for i, commands := range []string{row.on, row.off} {
					n.sh(t, commands)
					// Then cached decisions are over, 200 ms at 4 ms a request, and connections are offloaded again.
					lost[i] = load.More(50 + uint64(testenv.OffloadRequests))
				}
				return errors.Join(lost[0], lost[1], noneResent())
			}))
		})
		if t.Failed() {
			break // its rules may be left
		}
	}
}

// A firewall that is switched on sees each running connection after 200 ms, both ways: then nothing passes that it drops.
func TestFastPathAutoDelay(t *testing.T) {
	const most = time.Second // far more, because a busy machine's clock may tick late
	n := newAutoNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	start := time.Now()
	var all feeds
	for _, f := range testenv.Families {
		for _, protocol := range []string{"tcp", "udp"} {
			paths := n.forwardedPaths(f, a, web)
			paths[0].listen, paths[0].dial = at(f.Pod(web), 81), at(f.Pod(web), 81) // another server has port 80
			for _, p := range paths {
				opened := openPair(t, protocol, p.path)
				name := opened.name + ", " + f.Name
				all = append(all, startFeed(name+", request", start, opened.client, opened.server),
					startFeed(name+", reply", start, opened.server, opened.client))
			}
		}
	}
	n.eventuallyAllBypass(t, all, start)
	n.nft(t, `table inet own { chain c { type filter hook forward priority 0; policy drop; }; }`)
	on := time.Since(start)
	all.await(t, "packets after the delay", func(s *feed) *atomic.Int64 { return &s.sent }, on+2*most)
	testenv.DrainBacklog(t)
	var last time.Duration
	for _, s := range all {
		late := time.Duration(s.received.Load()) - on
		if last = max(last, late); late > most {
			t.Errorf("%s: the firewall is on, and has not seen what was sent %v later", s.name, late)
		}
	}
	t.Logf("the last packet that the firewall has not seen was sent %v after it was on", last)
}

// feed is one way of a running connection, whose packets have the time since the start of the test.
type feed struct {
	name           string
	sent, received atomic.Int64 // the last one's
}

type feeds []*feed

// startFeed sends a packet every few ms until the end of the test.
func startFeed(name string, start time.Time, from io.Writer, to io.Reader) *feed {
	s := &feed{name: name}
	go func() {
		for range time.Tick(4 * time.Millisecond) {
			now := time.Since(start)
			if binary.Write(from, binary.BigEndian, now) != nil {
				return
			}
			s.sent.Store(int64(now))
		}
	}()
	go func() {
		var sent time.Duration
		for binary.Read(to, binary.BigEndian, &sent) == nil {
			s.received.Store(int64(sent))
		}
	}()
	return s
}

// await waits until all have sent, or received, a packet of a later time.
func (all feeds) await(t *testing.T, what string, last func(*feed) *atomic.Int64, after time.Duration) {
	t.Helper()
	testenv.Eventually(t, what, func() error {
		for _, s := range all {
			if got := time.Duration(last(s).Load()); got <= after {
				return fmt.Errorf("%s: the last one is of %v, want one after %v", s.name, got, after)
			}
		}
		return nil
	})
}

// eventuallyAllBypass waits until all packets arrive without the node's stack.
func (n *network) eventuallyAllBypass(t *testing.T, all feeds, start time.Time) {
	t.Helper()
	testenv.Eventually(t, "all packets to bypass the stack", func() error {
		before := n.stackForwards(t, testenv.IPv4) + n.stackForwards(t, testenv.IPv6)
		all.await(t, "packets to arrive", func(s *feed) *atomic.Int64 { return &s.received }, time.Since(start))
		if count := n.stackForwards(t, testenv.IPv4) + n.stackForwards(t, testenv.IPv6) - before; count > 0 {
			return fmt.Errorf("it has forwarded %d", count)
		}
		return nil
	})
}
