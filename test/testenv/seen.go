package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"time"
)

// SeenPackets are what the stack of a namespace has sent and received.
type SeenPackets struct {
	Sent, Received int // SYNs
	Forbidden      int // received
}

// ForbiddenPort is where tests send what no policy admits, all the time.
const ForbiddenPort = 9

// CountPackets begins to count for Seen. Datagrams for ForbiddenPort are forbidden if one of the rules matches: for nft, "" for
// all.
func (ns *Namespace) CountPackets(tb TB, rules ...string) {
	tb.Helper()
	forbidden := ""
	for _, rule := range rules {
		forbidden += fmt.Sprintf("%s udp dport %d counter; ", rule, ForbiddenPort)
	}
	_, err := ns.Run(Context(tb), "nft", fmt.Sprintf(`table inet seen {
		chain out { type filter hook output priority -300; tcp flags & (syn | ack) == syn counter; };
		chain in { type filter hook prerouting priority -300; tcp flags & (syn | ack) == syn counter; %s }; }`, forbidden))
	Must(tb, err)
}

var seenCounters = regexp.MustCompile(`counter packets (\d+)`)

// Seen returns what was counted.
func (ns *Namespace) Seen(tb TB) (seen SeenPackets) {
	tb.Helper()
	text, err := ns.Run(Context(tb), "nft", "list", "table", "inet", "seen")
	Must(tb, err)
	found := seenCounters.FindAllStringSubmatch(text, -1)
	if len(found) < 3 {
		tb.Fatalf("counters: %s", text)
	}
	for i, match := range found { // in the order of the rules
		packets, err := strconv.Atoi(match[1])
		Must(tb, err)
		*[]*int{&seen.Sent, &seen.Received, &seen.Forbidden}[min(i, 2)] += packets
	}
	return seen
}

// Minus returns what was seen since before.
func (s SeenPackets) Minus(before SeenPackets) SeenPackets {
	return SeenPackets{s.Sent - before.Sent, s.Received - before.Received, s.Forbidden - before.Forbidden}
}

// SendUntil sends datagrams until ctx ends, also while there is no route. Some thousand per second are enough: more would
// fill the queues of the CPUs, also for tests beside this one.
func (ns *Namespace) SendUntil(ctx context.Context, tb TB, local, remote netip.AddrPort, pace time.Duration) {
	tb.Helper()
	if !local.IsValid() {
		local = netip.AddrPortFrom(Unspecified(remote.Addr()), 0)
	}
	conn, err := ns.ListenPacket(ctx, local)
	Must(tb, err)
	go func() {
		defer conn.Close()
		ticker := time.NewTicker(pace)
		defer ticker.Stop()
		for ctx.Err() == nil {
			<-ticker.C
			if _, err := conn.WriteToUDPAddrPort([]byte("forbidden"), remote); errors.Is(err, net.ErrClosed) {
				return
			}
		}
	}()
}
