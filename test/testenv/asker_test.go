package testenv

import (
	"net/netip"
	"strings"
	"testing"
	"time"
)

// TestAskers loses a datagram while two askers run: that is an error of this step, and not of the next one.
func TestAskers(t *testing.T) {
	ns := New(t, "asking")
	var all Askers
	for _, protocol := range []string{"tcp", "udp"} {
		serve := map[string]func(TB, *Namespace, netip.AddrPort) *Server{"tcp": ServeTCP, "udp": ServeUDP}[protocol]
		server := serve(t, ns, netip.MustParseAddrPort("127.0.0.1:0"))
		client, err := NewClient(Context(t), ns, protocol, netip.AddrPort{}, server.Addr)
		Must(t, err)
		t.Cleanup(func() { client.Close() })
		asker := client.KeepAsking(t, protocol, time.Millisecond)
		asker.patience = time.Second
		all = append(all, asker)
	}
	step := func(int) error { return all.More(10) }
	Must(t, all.Lossless(t, step))
	lose := func(int) error {
		_, err := ns.Run(Context(t), "nft", "table inet lossy { chain in { type filter hook input priority 0; meta l4proto udp numgen inc mod 10 == 3 drop; }; }")
		Must(t, err)
		return all.More(10)
	}
	if err := all.Lossless(t, lose); err == nil || !strings.Contains(err.Error(), "udp: lost a packet") || strings.Contains(err.Error(), "tcp:") {
		t.Errorf("got error %v, want that udp has lost a packet", err)
	}
	if _, err := ns.Run(Context(t), "nft", "flush", "ruleset"); err != nil {
		t.Fatal(err)
	}
	Must(t, all.Lossless(t, step))
	all.Stop()
}
