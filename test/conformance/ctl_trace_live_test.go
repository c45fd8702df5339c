package conformance

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// liveTrace is an `ebpfnetctl trace --live -o json` that runs on a node.
type liveTrace struct {
	host  *host
	cmd   *exec.Cmd
	lines chan string
	files []string // of the datapath, before
}

// liveLine is what it tells of a packet.
type liveLine struct {
	Seen struct {
		Device  string
		Leaving bool
		LeftOut int
	}
	Request tracedWay
}

func (h *host) traceLive(t *testing.T, from, to string) *liveTrace {
	t.Helper()
	l := &liveTrace{host: h, lines: make(chan string, 1000), files: filesOf(t)}
	l.cmd = exec.CommandContext(testenv.Context(t), testenv.Build(t, "./cmd/ebpfnetctl"), "trace", "--live", from, to, "-o", "json")
	out, err := l.cmd.StdoutPipe()
	if err == nil {
		err = h.Node.Do(l.cmd.Start)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.cmd.Process.Kill() })
	go func() {
		defer close(l.lines)
		for scanner := bufio.NewScanner(out); scanner.Scan(); {
			l.lines <- scanner.Text()
		}
	}()
	return l
}

// read returns what was told since the last read.
func (l *liveTrace) read() (told []liveLine, err error) {
	for len(l.lines) > 0 {
		var line liveLine
		if err := json.Unmarshal([]byte(<-l.lines), &line); err != nil {
			return nil, err
		}
		told = append(told, line)
	}
	return told, nil
}

// stop ends it, and wants nothing of it left on the node.
func (l *liveTrace) stop(t *testing.T, signal os.Signal) {
	t.Helper()
	if n := l.host.packetSockets(t); n != 1 {
		t.Errorf("while it runs: got %d packet sockets, want 1", n)
	}
	if err := l.cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
	for range l.lines {
	}
	if err := l.cmd.Wait(); err != nil && signal == os.Interrupt {
		t.Errorf("after SIGINT: %v", err)
	}
	if n := l.host.packetSockets(t); n != 0 {
		t.Errorf("after %v: got %d packet sockets, want none", signal, n)
	}
	if files := filesOf(t); !slices.Equal(files, l.files) {
		t.Errorf("after %v: got the files %q, want %q", signal, files, l.files)
	}
}

// packetSockets counts those of the node.
func (h *host) packetSockets(t *testing.T) (n int) {
	t.Helper()
	err := h.Node.Do(func() error {
		text, err := os.ReadFile("/proc/thread-self/net/packet")
		n = strings.Count(string(text), "\n") - 1 // a heading
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// filesOf lists the pins, locks and records of the datapath.
func filesOf(t *testing.T) (files []string) {
	t.Helper()
	for _, dir := range []string{loader.Root, record.DefaultDir} {
		err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
			files = append(files, path)
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	return files
}

// TestTraceLive has trace tell the ways of a real connection's packets: as the programs will do it, and as they are
// seen on the uplink, translated. A reader that is killed leaves as little behind as one that is ended.
func TestTraceLive(t *testing.T) {
	h, client, web := newTracedHost(t)
	for _, family := range testenv.Families {
		remote, node, inWeb := netip.AddrPortFrom(family.Outside, 7001), netip.AddrPortFrom(family.Node, 8080), netip.AddrPortFrom(family.Pod(web), 80)
		testenv.ServeTCP(t, h.Outside, remote)
		testenv.ServeTCP(t, web.Namespace, inWeb)
		out := &liveConnection{client: open(t, client.Namespace, remote), kinds: func(l liveLine, local, peer netip.AddrPort) map[string]bool {
			return map[string]bool{
				"request": !l.Seen.Leaving && l.Request.Source == local && l.Request.FinalSource == peer && l.Request.Fate == "sent",
				"seen":    l.Seen.Leaving && l.Seen.Device == testenv.UplinkName && l.Request.FinalSource == peer,
				"reply":   !l.Seen.Leaving && l.Request.Source == remote && l.Request.FinalDestination == local && l.Request.Fate == "delivered",
			}
		}}
		in := &liveConnection{client: open(t, h.Outside, node), kinds: func(l liveLine, local, _ netip.AddrPort) map[string]bool {
			return map[string]bool{
				"request": !l.Seen.Leaving && l.Request.Destination == node && l.Request.FinalDestination == inWeb && l.Request.Fate == "delivered",
				"seen":    l.Seen.Leaving && l.Seen.Device == testenv.UplinkName && l.Request.FinalSource == node && l.Request.FinalDestination == local,
				"reply":   !l.Seen.Leaving && l.Request.Source == inWeb && l.Request.FinalSource == node && l.Request.Fate == "sent",
			}
		}}
		for _, row := range []struct {
			from, to string
			of       *liveConnection
			end      os.Signal
		}{
			{"client", "outside:7001", out, os.Kill},
			{"outside", "web:80", in, os.Interrupt},
			{"client", remote.String(), out, os.Interrupt},
			{"outside", node.String(), in, os.Kill},
		} {
			t.Run(strings.Join([]string{family.Name, row.from, row.to}, " "), func(t *testing.T) {
				live := h.traceLive(t, row.from, row.to)
				row.of.wantTold(t, live)
				live.stop(t, row.end)
			})
		}
	}
}

// liveConnection is a connection whose packets are told.
type liveConnection struct {
	client *testenv.Client
	// kinds returns which of the packets that are wanted a line is, of a client whom the server sees as peer.
	kinds func(line liveLine, local, peer netip.AddrPort) map[string]bool
}

func open(t *testing.T, from *testenv.Namespace, remote netip.AddrPort) *testenv.Client {
	t.Helper()
	client, err := testenv.NewClient(testenv.Context(t), from, "tcp", netip.AddrPort{}, remote)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// wantTold asks until each kind of packet was told.
func (c *liveConnection) wantTold(t *testing.T, live *liveTrace) {
	t.Helper()
	told := map[string]bool{}
	testenv.Eventually(t, "the connection's packets to be told", func() error {
		got, err := c.client.Ask(testenv.Context(t), "hello")
		if err != nil {
			return err
		}
		lines, err := live.read()
		for _, line := range lines {
			for kind, isIt := range c.kinds(line, c.client.Local(), got.Peer) {
				told[kind] = told[kind] || isIt
			}
		}
		if err == nil && !(told["request"] && told["seen"] && told["reply"]) {
			err = fmt.Errorf("told so far: %v", told)
		}
		return err
	})
}
