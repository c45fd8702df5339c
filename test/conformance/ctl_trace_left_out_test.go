package conformance

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestTraceLiveLeftOut stops the reader while packets come for which its socket has no room: it counts them.
func TestTraceLiveLeftOut(t *testing.T) {
	const flood = 3000 // several times what a socket has room for

	h := newHost(t)
	runtime := testenv.NewRuntime(t, h.Node, []byte(scriptConflist), filepath.Dir(h.plugin))
	client := runtime.AddPod(t, "client", nil)
	remote := netip.AddrPortFrom(testenv.OutsideAddr4, 7001)
	testenv.ServeUDP(t, h.Outside, remote)
	live := h.traceLive(t, "client", remote.String()+"/udp")
	conn, err := client.DialFrom(testenv.Context(t), "udp", netip.AddrPort{}, remote)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	sent, counted := 0, 0
	send := func() error {
		sent++
		_, err := conn.Write([]byte("hello"))
		return err
	}
	// Each packet is told or counted as the container's, and as it leaves by the uplink. Those of this moment are not yet.
	wantCounted := func() {
		t.Helper()
		testenv.Eventually(t, "packets to be told, or counted", func() error {
			lines, err := live.read()
			for _, line := range lines {
				counted += 1 + line.Seen.LeftOut
			}
			if err == nil && (counted == 0 || counted < 2*sent-flood/2) {
				err = errors.Join(send(), fmt.Errorf("%d packets were sent, and %d told or counted", sent, counted))
			}
			return err
		})
	}
	wantCounted()
	if err := live.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for range flood {
		if err := send(); err != nil {
			t.Fatal(err)
		}
	}
	if err := live.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	wantCounted()
	live.stop(t, os.Interrupt)
}
