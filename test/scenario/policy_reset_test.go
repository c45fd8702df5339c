package scenario

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// side is one end of a TCP connection.
type side struct {
	net.Conn
	ns    *testenv.Namespace
	match string // of the packets that the end receives, for nft
}

var counted = regexp.MustCompile(`counter packets (\d+)`)

// countResets counts the RSTs that the ends receive from now on.
func countResets(t *testing.T, sides ...side) func(side) string {
	t.Helper()
	for _, s := range sides {
		_, err := s.ns.Run(testenv.Context(t), "nft", fmt.Sprintf(
			`table inet rst { chain in { type filter hook prerouting priority -300; tcp flags & rst == rst %s counter; }; }`, s.match))
		testenv.Must(t, err)
		t.Cleanup(func() { _, _ = s.ns.Run(testenv.Context(t), "nft", "delete", "table", "inet", "rst") })
	}
	return func(s side) string {
		text, err := s.ns.Run(testenv.Context(t), "nft", "list", "table", "inet", "rst")
		testenv.Must(t, err)
		return counted.FindStringSubmatch(text)[1]
	}
}

// wantReset sends by the end, and wants a RST.
func wantReset(t *testing.T, name string, s side) {
	t.Helper()
	if _, err := s.Write([]byte("still there?")); errors.Is(err, syscall.ECONNRESET) {
		return
	}
	testenv.Must(t, s.SetReadDeadline(time.Now().Add(testenv.Timeout)))
	if _, err := s.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: got %v, want a RST", name, err)
	}
}

// pipe opens a connection, and sends enough in both directions for the fast path.
func pipe(t *testing.T, from, to *testenv.Namespace, listen, dial netip.AddrPort) (client, server side) {
	t.Helper()
	listener, err := to.Listen(testenv.Context(t), listen)
	testenv.Must(t, err)
	t.Cleanup(func() { listener.Close() }) // it shows who has opened the connection
	client, server = side{ns: from, match: fmt.Sprint("tcp sport ", dial.Port())}, side{ns: to, match: fmt.Sprint("tcp dport ", listen.Port())}
	client.Conn, err = from.Dial(testenv.Context(t), "tcp", dial)
	testenv.Must(t, err)
	server.Conn, err = listener.Accept()
	testenv.Must(t, err)
	t.Cleanup(func() { client.Close(); server.Close() })
	for range testenv.OffloadRequests {
		for _, way := range [][2]side{{client, server}, {server, client}} {
			_, err := way[0].Write([]byte("x"))
			testenv.Must(t, err)
			_, err = way[1].Read(make([]byte, 1))
			testenv.Must(t, err)
		}
	}
	return client, server
}

// A permission ends while TCP connections use it. Each end gets one RST, for the next segment that it sends, whichever is first.
func TestPolicyResets(t *testing.T) {
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		pod, a := n.AddPod(t, "pod", mapBoth(8080, 80)), n.AddPod(t, "a", nil)
		b := n.AddPod(t, "b", nil)
		hasServices := !strings.Contains(conflist, `"always"`)
		if hasServices {
			n.nft(t, serviceRules(b)+strings.NewReplacer("services", "own", "10.96.0.1", "10.96.0.3", "fd00:96::1", "fd00:96::3").Replace(serviceRules(pod)))
		}
		for _, f := range testenv.Families {
			n.RouteTo(t, f.PodSubnet)
			ways := map[string][2]netip.AddrPort{ // listen, dial
				"opened to a": {at(f.Pod(a), 81)}, "opened to outside": {at(f.Outside, 82)},
				"accepted from a": {at(f.Pod(pod), 83)}, "accepted from outside": {at(f.Pod(pod), 84)}, "accepted from node": {at(f.Pod(pod), 85)},
				"accepted from outside, host port": {at(f.Pod(pod), 80), at(f.Node, 8080)},
			}
			if hasServices {
				ways["opened to b, service"] = [2]netip.AddrPort{at(f.Pod(b), 86), at(serviceOf(f), 86)}
				ways["accepted from a, service"] = [2]netip.AddrPort{at(f.Pod(pod), 87), at(serviceOf(f).Next().Next(), 87)}
			}
			for name, way := range ways {
				verb, rest, _ := strings.Cut(name, " ")
				peer := map[string]*testenv.Namespace{"a": a.Namespace, "b": b.Namespace, "outside": n.Outside, "node": n.node()}[strings.Trim(strings.Fields(rest)[1], ",")]
				from, to := pod.Namespace, peer
				if verb == "accepted" {
					from, to = peer, pod.Namespace
				}
				if !way[1].IsValid() {
					way[1] = way[0]
				}
				open, shut := `{"ingress": [{}]}`, `{"ingress": []}`
				if verb == "opened" {
					open, shut = `{"egress": [{}]}`, `{"egress": []}`
				}
				if strings.Contains(rest, "node") {
					open, shut = `{"host": false, "ingress": [{"from": [{"cidr": "0.0.0.0/0"}, {"cidr": "::/0"}]}]}`, `{"host": false, "ingress": []}`
				}
				for _, older := range []bool{false, true} {
					if older && name == "opened to b, service" {
						continue // the backend of an older connection is not known
					}
					for _, clientFirst := range []bool{true, false} {
						t.Run(fmt.Sprintf("%s, %s, older %v, client first %v", f.Name, name, older, clientFirst), func(t *testing.T) {
							before := open
							if older {
								before = "none"
							}
							n.wantResets(t, pod, revocation{from, to, way[0], way[1], before, shut}, clientFirst)
						})
					}
				}
			}
		}
	})
}

// revocation is a connection that rules admit, and later ones do not.
type revocation struct {
	from, to     *testenv.Namespace
	listen, dial netip.AddrPort
	open, shut   string // the rules; "none": none yet
}

// wantResets has a permission end while a connection uses it, and wants one RST for each end, for the next segment that it sends.
func (n *network) wantResets(t *testing.T, pod *testenv.Pod, r revocation, clientFirst bool) {
	t.Helper()
	if r.open == "none" {
		n.ctl(t, "set", "pods/pod", "policy=none")
	} else {
		n.setPolicy(t, pod, r.open)
	}
	client, server := pipe(t, r.from, r.to, r.listen, r.dial)
	resets := countResets(t, client, server)
	n.setPolicy(t, pod, r.shut)
	first, second := client, server
	if !clientFirst {
		first, second = server, client
	}
	wantReset(t, "first", first)
	wantReset(t, "second", second)
	for end, s := range map[string]side{"client": client, "server": server} {
		if got := resets(s); got != "1" {
			t.Errorf("the %s has got %s RSTs, want 1", end, got)
		}
	}
}

// The same by an uplink whose packets have no Ethernet headers.
func TestPolicyResetsWithoutEthernet(t *testing.T) {
	tun := testenv.UplinkKinds[len(testenv.UplinkKinds)-1]
	testenv.Require(t, tun.Feature)
	forEachFastPath(t, `"ipMasq": true`, func(t *testing.T, conflist string) {
		n := newNetworkWith(t, conflist)
		n.MoveUplink(t, tun)
		pod := n.AddPod(t, "pod", mapBoth(8080, 80))
		for _, f := range testenv.Families {
			n.RouteTo(t, f.PodSubnet)
			opened := revocation{pod.Namespace, n.Outside, at(f.Outside, 82), at(f.Outside, 82), `{"egress": [{}]}`, `{"egress": []}`}
			accepted := revocation{n.Outside, pod.Namespace, at(f.Pod(pod), 84), at(f.Pod(pod), 84), `{"ingress": [{}]}`, `{"ingress": []}`}
			byHostPort := accepted
			byHostPort.listen, byHostPort.dial = at(f.Pod(pod), 80), at(f.Node, 8080)
			for name, r := range map[string]revocation{"opened": opened, "accepted": accepted, "accepted, host port": byHostPort} {
				for _, open := range []string{r.open, "none"} {
					for _, clientFirst := range []bool{true, false} {
						t.Run(fmt.Sprintf("%s, %s, before %s, client first %v", f.Name, name, open, clientFirst), func(t *testing.T) {
							r.open = open
							n.wantResets(t, pod, r, clientFirst)
						})
					}
				}
			}
		}
	})
}
