package conformance

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	ebpfmaps "github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// tracedPath is a path as `ebpfnetctl trace -o json` prints it.
type tracedPath struct {
	Verdict          string         `json:"verdict"`
	Detail           string         `json:"detail"`
	FinalSource      netip.AddrPort `json:"finalSource"`
	FinalDestination netip.AddrPort `json:"finalDestination"`
}

// trace runs `ebpfnetctl trace --reply`.
func (h *host) trace(t *testing.T, exit int, from, to netip.AddrPort, protocol string) (request, reply tracedPath) {
	t.Helper()
	code, stdout, stderr := h.ctl(t, "trace", from.String(), to.String()+"/"+protocol, "--reply", "-o", "json")
	if code != exit {
		t.Fatalf("trace: got exit code %d, want %d: %s%s", code, exit, stdout, stderr)
	}
	var result struct{ Request, Reply tracedPath }
	if err := json.Unmarshal([]byte(stdout), &result); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	return result.Request, result.Reply
}

// newTracedHost makes a host with a client, and with a web server behind host port 8080.
func newTracedHost(t *testing.T) (h *host, client, web *testenv.Pod) {
	t.Helper()
	h = newHost(t)
	runtime := testenv.NewRuntime(t, h.Node, []byte(scriptConflist), filepath.Dir(h.plugin))
	client = runtime.AddPod(t, "client", nil)
	web = runtime.AddPod(t, "web", map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}})
	return h, client, web
}

// TestTraceAgrees traces the first packet of a connection and its reply, and then opens that very connection: the server
// must see the same addresses and ports.
func TestTraceAgrees(t *testing.T) {
	h, client, web := newTracedHost(t)
	for _, family := range testenv.Families {
		protocol := map[bool]string{true: "tcp", false: "udp"}[family.Is4()]
		inWeb, inClient := family.Pod(web), family.Pod(client)
		testenv.Must(t, h.Outside.AddRoute(netip.PrefixFrom(inWeb, inWeb.BitLen()), family.Node))
		loopback := netip.MustParseAddr("127.0.0.1")
		if family.Node.Is6() {
			loopback = netip.IPv6Loopback()
		}
		for i, c := range []struct {
			name    string
			from    *testenv.Namespace
			local   netip.Addr
			remote  netip.AddrPort
			to      *testenv.Namespace
			server  netip.AddrPort
			onlyTCP bool
		}{
			{"pod to outside", client.Namespace, inClient, netip.AddrPortFrom(family.Outside, 7001), h.Outside, netip.AddrPortFrom(family.Outside, 7001), false},
			{"pod to pod", client.Namespace, inClient, netip.AddrPortFrom(inWeb, 7002), web.Namespace, netip.AddrPortFrom(inWeb, 7002), false},
			{"outside to host port", h.Outside, family.Outside, netip.AddrPortFrom(family.Node, 8080), web.Namespace, netip.AddrPortFrom(inWeb, 80), true},
			{"outside to pod", h.Outside, family.Outside, netip.AddrPortFrom(inWeb, 7003), web.Namespace, netip.AddrPortFrom(inWeb, 7003), false},
			{"pod to host port", client.Namespace, inClient, netip.AddrPortFrom(family.Node, 8080), web.Namespace, netip.AddrPortFrom(inWeb, 80), true},
			{"pod to its own host port", web.Namespace, inWeb, netip.AddrPortFrom(family.Node, 8080), web.Namespace, netip.AddrPortFrom(inWeb, 80), true},
			{"host to host port", h.Node, loopback, netip.AddrPortFrom(loopback, 8080), web.Namespace, netip.AddrPortFrom(inWeb, 80), true},
			{"pod to host", client.Namespace, inClient, netip.AddrPortFrom(family.Node, 7004), h.Node, netip.AddrPortFrom(family.Node, 7004), false},
			{"host to pod", h.Node, family.Node, netip.AddrPortFrom(inWeb, 7005), web.Namespace, netip.AddrPortFrom(inWeb, 7005), false},
		} {
			protocol := protocol
			if c.onlyTCP {
				protocol = "tcp"
			}
			t.Run(strings.Join([]string{c.name, family.Name, protocol}, " "), func(t *testing.T) {
				local := netip.AddrPortFrom(c.local, uint16(41000+i))
				request, reply := h.trace(t, 0, local, c.remote, protocol)
				serve := testenv.ServeTCP
				if protocol == "udp" {
					serve = testenv.ServeUDP
				}
				serve(t, c.to, c.server)
				client, err := testenv.NewClient(testenv.Context(t), c.from, protocol, local, c.remote)
				testenv.Must(t, err)
				defer client.Close()
				got, err := client.Ask(testenv.Context(t), "hello")
				testenv.Must(t, err)
				if request.FinalSource != got.Peer || request.FinalDestination != c.server {
					t.Errorf("request: trace prints %+v; the server at %v saw %v", request, c.server, got.Peer)
				}
				if reply.FinalSource != c.remote || reply.FinalDestination != local {
					t.Errorf("reply: trace prints %+v; the client at %v asked %v", reply, local, c.remote)
				}
			})
		}
	}
}

// TestTraceLeavesNothing dumps all pinned maps before and after traces of known and new connections, in which
// programs write flows, hints, counters and decisions: the dumps are equal.
func TestTraceLeavesNothing(t *testing.T) {
	h := newHost(t)
	small := strings.Replace(scriptConflist, `"ipMasq"`, `"maxFlows": 1024, "ipMasq"`, 1) // which makes the dumps quick
	runtime := testenv.NewRuntime(t, h.Node, []byte(small), filepath.Dir(h.plugin))
	client, vault := runtime.AddPod(t, "client", nil), runtime.AddPod(t, "vault", nil)
	if code, _, stderr := h.ctl(t, "set", "pods/vault/eth0", "ingressPolicy=isolated"); code != 0 {
		t.Fatal(stderr)
	}
	family := testenv.Families[0]
	remote := netip.AddrPortFrom(family.Outside, 7001)
	conn := quietConnection(t, client.Namespace, h.Outside, remote)
	h.withDatapath(t, func(d *loader.Datapath) error {
		flows, errFlows := ebpfmaps.Flows(d)
		offloads, errOffloads := ebpfmaps.OffloadEntries(d)
		if len(flows) == 0 || len(offloads) == 0 {
			t.Errorf("got %d flows and %d offloads, want some that could change", len(flows), len(offloads))
		}
		return errors.Join(errFlows, errOffloads)
	})
	before := h.dumpMaps(t)
	for _, path := range []struct {
		exit     int
		from, to string
		want     string
	}{
		{0, conn.LocalAddr().String(), remote.String(), "redirects it, past the host's stack"}, // both directions: it is offloaded
		{0, "client", remote.String() + "/udp", "stack on"},
		{0, "outside", family.Node.String(), "delivered to the host itself"},
		{3, "client", family.Pod(vault).String() + ":80", "dropped"},
		{0, "vault", family.Pod(client).String() + "/icmp", "delivered"},
	} {
		code, stdout, stderr := h.ctl(t, "trace", path.from, path.to, "--reply")
		if code != path.exit || !strings.Contains(stdout, path.want) {
			t.Fatalf("trace %s %s: got exit code %d, want %d and %q: %s%s", path.from, path.to, code, path.exit, path.want, stdout, stderr)
		}
	}
	after := h.dumpMaps(t)
	for name, entries := range before {
		if !maps.Equal(entries, after[name]) {
			t.Errorf("map %s: got %x after traces, want %x", name, after[name], entries)
		}
	}
}

// quietConnection returns a connection that is offloaded, and whose last packet has been sent: both ends have
// acknowledged all data, which they may do with a delay.
func quietConnection(t *testing.T, from, to *testenv.Namespace, remote netip.AddrPort) net.Conn {
	t.Helper()
	listener, err := to.Listen(testenv.Context(t), remote)
	testenv.Must(t, err)
	defer listener.Close()
	client, err := from.DialFrom(testenv.Context(t), "tcp", netip.AddrPort{}, remote)
	testenv.Must(t, err)
	t.Cleanup(func() { client.Close() })
	server, err := listener.Accept()
	testenv.Must(t, err)
	t.Cleanup(func() { server.Close() })
	ends := [...]net.Conn{client, server}
	for i := range 2 * testenv.OffloadRequests { // then it is offloaded
		if _, err := ends[i%2].Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(ends[1-i%2], make([]byte, len("hello"))); err != nil {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, "both ends to have acknowledged all data", func() error {
		for _, end := range ends {
			if n, err := unacknowledged(end.(*net.TCPConn)); n != 0 || err != nil {
				return fmt.Errorf("%d bytes of %v are not acknowledged: %w", n, end.LocalAddr(), err)
			}
		}
		return nil
	})
	return client
}

// unacknowledged returns the number of bytes that conn has sent, or is to send, and that are not acknowledged.
func unacknowledged(conn *net.TCPConn) (n int, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	errControl := raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return n, errors.Join(err, errControl)
}

// dumpMaps returns the entries of all pinned maps, but for memory of one packet and what is per CPU, which packets of
// the host's own (neighbor discovery) use.
func (h *host) dumpMaps(t *testing.T) map[string]map[string]string {
	t.Helper()
	all := map[string]map[string]string{}
	err := h.Node.WithDatapath(func(datapath *loader.Datapath) error {
		pins, err := filepath.Glob(filepath.Join(datapath.Dir(), "maps", "*"))
		for _, pin := range pins {
			m, errPin := ebpf.LoadPinnedMap(pin, nil)
			if errPin != nil {
				return errPin
			}
			if m.Type() != ebpf.PerCPUArray && m.Type() != ebpf.RingBuf {
				all[filepath.Base(pin)], errPin = dumpMap(m)
			}
			err = errors.Join(err, errPin, m.Close())
		}
		return err
	})
	if err != nil || len(all) < 20 {
		t.Fatalf("dump the maps: got %d of them: %v", len(all), err)
	}
	return all
}

func dumpMap(m *ebpf.Map) (map[string]string, error) {
	entries := map[string]string{}
	key, err := m.NextKeyBytes(nil)
	for key != nil && err == nil {
		var value []byte
		if value, err = m.LookupBytes(key); err == nil {
			if strings.Trim(string(value), "\x00") != "" {
				entries[string(key)] = string(value)
			}
			key, err = m.NextKeyBytes(key)
		}
	}
	return entries, err
}
