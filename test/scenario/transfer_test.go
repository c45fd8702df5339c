package scenario

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// Large packets are where translations go wrong: with offloads on, TCP hands packets of
// 64 KiB from one namespace to the next whose checksums nobody has computed yet.

const mebibyte = 1 << 20

// sizeOf is size, or what an emulated CPU manages.
func sizeOf(size int64) int64 {
	if testing.Short() {
		return min(size, 4*mebibyte)
	}
	return size
}

// transferTimeout is for the largest transfer on a loaded machine.
const transferTimeout = 3 * time.Minute

// transfer sends data between a client and a server, which the client may reach by another
// address than the server's own.
type transfer func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort)

// byEachPath transfers on each way that TCP can take through the node.
func byEachPath(t *testing.T, n *network, send transfer) {
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	inEachFamily(t, func(t *testing.T, f family) {
		onWeb, onOutside := at(f.pod(web), 80), at(f.outside, 80)
		t.Run("pod to pod", func(t *testing.T) { send(t, a.Namespace, web.Namespace, onWeb, onWeb) })
		t.Run("pod to outside", func(t *testing.T) { send(t, a.Namespace, n.Outside, onOutside, onOutside) })
		t.Run("outside to host port", func(t *testing.T) {
			send(t, n.Outside, web.Namespace, onWeb, at(f.node, 8080))
		})
		t.Run("host to host port", func(t *testing.T) {
			send(t, n.node(), web.Namespace, onWeb, at(f.loopbacks()[0], 8080))
		})
		t.Run("pod to host port", func(t *testing.T) {
			send(t, a.Namespace, web.Namespace, onWeb, at(f.node, 8080))
		})
	})
}

// upload is the transfer from the client to the server.
func upload(size int64) transfer {
	return func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort) {
		ctx, cancel := context.WithTimeout(t.Context(), transferTimeout)
		defer cancel()
		if err := testenv.Transfer(ctx, client, server, listen, dial, size, 1); err != nil {
			t.Fatal(err)
		}
	}
}

// download is the transfer from the server to the client.
func download(size int64) transfer {
	return func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort) {
		ctx, cancel := context.WithTimeout(t.Context(), transferTimeout)
		defer cancel()
		if err := receive(ctx, client, server, listen, dial, size); err != nil {
			t.Fatal(err)
		}
	}
}

func TestTransfers(t *testing.T) {
	byEachPath(t, newNetwork(t), upload(sizeOf(256*mebibyte)))
}

func TestTransfersBack(t *testing.T) {
	byEachPath(t, newNetwork(t), download(sizeOf(16*mebibyte)))
}

// Without offloads every packet is what it is on a wire: its checksum must be right
// when it leaves the node.
func TestTransfersWithoutOffloads(t *testing.T) {
	n := newNetwork(t)
	for _, ns := range []*testenv.Namespace{n.node(), n.Outside} {
		if err := ns.SetOffloads(testenv.UplinkName, false); err != nil {
			t.Fatal(err)
		}
	}
	byEachPath(t, n, func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort) {
		for _, ns := range []*testenv.Namespace{client, server} {
			if err := ns.SetOffloads(testenv.PodIfName, false); err != nil {
				t.Fatal(err)
			}
		}
		upload(sizeOf(16*mebibyte))(t, client, server, listen, dial)
		download(sizeOf(16*mebibyte))(t, client, server, listen, dial)
	})
}

// receive is testenv.Transfer the other way: the server sends.
func receive(ctx context.Context, client, server *testenv.Namespace, listen, dial netip.AddrPort, size int64) error {
	listener, err := server.Listen(ctx, listen)
	if err != nil {
		return err
	}
	defer listener.Close()

	sent := sha256.New()
	sending := make(chan error, 1)
	go func() {
		conn, err := listener.Accept()
		if err == nil {
			defer conn.Close()
			defer context.AfterFunc(ctx, func() { conn.Close() })()
			_, err = io.Copy(conn, io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{}), size), sent))
		}
		sending <- err
	}()

	conn, err := client.Dial(ctx, "tcp", dial)
	if err != nil {
		return err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	received := sha256.New()
	if n, err := io.Copy(received, conn); err != nil || n != size {
		return fmt.Errorf("received %d bytes of %d: %w", n, size, err)
	}
	if err := <-sending; err != nil {
		return fmt.Errorf("send: %w", err)
	}
	if !bytes.Equal(sent.Sum(nil), received.Sum(nil)) {
		return fmt.Errorf("data changed on the way: %x sent, %x received", sent.Sum(nil), received.Sum(nil))
	}
	return nil
}
