package scenario

import (
	"context"
	"fmt"
	"net"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/admin"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const dropInvalid = `table inet filter { chain forward { type filter hook forward priority 0; policy accept; ct state invalid drop } }`

// Offloaded connections continue when they have to pass the stack again, although conntrack has not seen their data.
func TestOffloadedConnectionsReturn(t *testing.T) {
	connectionsReturn(t, func(n *network, f testenv.Family, a, web *testenv.Pod, loaded bool) (paths []path) {
		for _, p := range n.forwardedPaths(f, a, web) {
			if loaded || p.seen == p.clientAddr && p.dial == p.listen { // nobody else translates
				paths = append(paths, p.path)
			}
		}
		return paths
	})
}

// connectionsReturn wants connections to continue that return to the stack while the datapath stays loaded, or does not.
func connectionsReturn(t *testing.T, paths func(n *network, f testenv.Family, a, web *testenv.Pod, loaded bool) []path) {
	t.Helper()
	testenv.Require(t, testenv.Conntrack)
	const limit = "ingressRate=8000000000"
	for i, command := range [][]string{{"unload", "--yes"}, {"set", "pods/a", limit}, {"set", "pods/web", limit}} {
		t.Run(strings.Join(command, " "), func(t *testing.T) {
			n := newEstablishedNetwork(t)
			n.nft(t, dropInvalid)
			a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
			var ends [][2]net.Conn
			for _, f := range testenv.Families {
				for _, p := range paths(n, f, a, web, i > 0) {
					client, server := n.offloadUnseen(t, p)
					ends = append(ends, [2]net.Conn{client, server}, [2]net.Conn{server, client})
				}
			}
			n.ctl(t, command...)
			for _, e := range ends {
				send(t, e[0], e[1], "still there?")
			}
		})
	}
}

// offloadUnseen opens a connection, and offloads it with data that conntrack does not see.
func (n *network) offloadUnseen(t *testing.T, p path) (client, server net.Conn) {
	t.Helper()
	client, server = connectPair(t, p)
	usesBeforeQuiet["requests"](t, client, server)
	unseen := strings.Repeat("x", 16*mebibyte) // exceeds the TCP window
	send(t, client, server, unseen)
	send(t, server, client, unseen)
	opener := plain(client.LocalAddr())
	out := n.ctl(t, "flows", "--port", fmt.Sprint(opener.Port()), "-o", "json")
	if !strings.Contains(out, `"path": "offload"`) || !strings.Contains(out, `"source": "`+opener.String()+`"`) {
		t.Fatalf("the connection is not offloaded, or not opened by %s: %s", opener, out)
	}
	return client, server
}

// Where conntrack cannot be prepared, warnings say so. The change is made, and their advice keeps the connections.
func TestOffloadedConnectionsMayEnd(t *testing.T) {
	const advice = "net/netfilter/nf_conntrack_tcp_be_liberal"
	testenv.Require(t, testenv.Conntrack)
	n := newEstablishedNetwork(t)
	n.nft(t, dropInvalid)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", nil)
	client4, server4 := n.offloadUnseen(t, n.forwardedPaths(testenv.Families[0], a, web)[0].path)
	client6, server6 := n.offloadUnseen(t, n.forwardedPaths(testenv.Families[1], a, web)[0].path)
	testenv.Must(t, n.node().SetSysctl(advice, "1"))
	expired, cancel := context.WithCancel(t.Context()) // which ends the preparation after one connection
	cancel()
	wantAdvice := func(warning string) {
		t.Helper()
		if !strings.Contains(warning, strings.ReplaceAll(advice, "/", ".")+" is not 1") {
			t.Errorf("got the warning %q, want the advice", warning)
		}
	}
	testenv.Must(t, n.node().Do(func() error {
		op, err := admin.Open(loader.OpenLoaded, "")
		testenv.Must(t, err)
		defer op.Close()
		rate := uint64(8e9)
		limit := record.Settings{Limits: record.Limits{IngressRate: &rate}}
		changed, warnings, err := op.Set(expired, maps.Attachment{Network: "pods"}, limit)
		if err != nil || len(changed) != 2 || len(warnings) != 2 {
			t.Errorf("set: got %q and warnings %q (%v), want 2 of each", changed, warnings, err)
		}
		for _, warning := range warnings {
			wantAdvice(warning)
		}
		send(t, client4, server4, "still there?")
		send(t, client6, server6, "still there?")
		warning, err := op.Unload(expired)
		wantAdvice(fmt.Sprint(warning))
		return err
	}))
	send(t, server4, client4, "still there?")
	send(t, server6, client6, "still there?")
}
