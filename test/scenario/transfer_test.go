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

	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// With offloads on, TCP passes packets of 64 KiB with incomplete checksums from one namespace to the next, which
// translation has to preserve.

const mebibyte = 1 << 20

// sizeOf returns size, or with -short at most what an emulated CPU transfers in time.
func sizeOf(size int64) int64 {
	if testing.Short() {
		return min(size, 4*mebibyte)
	}
	return size
}

// transferTimeout suffices for the largest transfer on a busy machine.
const transferTimeout = 3 * time.Minute

// transfer sends data between a client and a server. The client dials an address that may differ from the
// server's own.
type transfer func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort)

// transferOnAllPaths runs a subtest for each path and family.
func transferOnAllPaths(t *testing.T, n *network, send transfer) {
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	forEachFamily(t, func(t *testing.T, f testenv.Family) {
		for _, p := range n.allPaths(f, a, web) {
			t.Run(p.name, func(t *testing.T) { send(t, p.client, p.server, p.listen, p.dial) })
		}
	})
}

// upload transfers from the client to the server.
func upload(size int64) transfer {
	return func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort) {
		ctx, cancel := context.WithTimeout(t.Context(), transferTimeout)
		defer cancel()
		testenv.Must(t, testenv.Transfer(ctx, client, server, listen, dial, size, 1))
	}
}

// download transfers from the server to the client.
func download(size int64) transfer {
	return func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort) {
		ctx, cancel := context.WithTimeout(t.Context(), transferTimeout)
		defer cancel()
		testenv.Must(t, receive(ctx, client, server, listen, dial, size))
	}
}

func TestUploads(t *testing.T) {
	transferOnAllPaths(t, newNetwork(t), upload(sizeOf(32*mebibyte)))
}

func TestDownloads(t *testing.T) {
	transferOnAllPaths(t, newNetwork(t), download(sizeOf(16*mebibyte)))
}

// Without offloads every packet needs a complete checksum when it leaves the node.
func TestTransfersWithoutOffloads(t *testing.T) {
	n := newNetwork(t)
	for _, ns := range []*testenv.Namespace{n.node(), n.Outside} {
		testenv.Must(t, ns.SetOffloads(testenv.UplinkName, false))
	}
	transferOnAllPaths(t, n, func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort) {
		for _, ns := range []*testenv.Namespace{client, server} {
			testenv.Must(t, ns.SetOffloads(testenv.PodIfName, false))
		}
		upload(sizeOf(16*mebibyte))(t, client, server, listen, dial)
		download(sizeOf(16*mebibyte))(t, client, server, listen, dial)
	})
}

// Packets come with the sum of their pseudo header only, which translation changes, and get the rest when they leave the node.
func TestTransfersCompletedByTheNode(t *testing.T) {
	for _, path := range []string{"auto", "never"} {
		t.Run(path, func(t *testing.T) {
			n := newNetworkWith(t, withKeys(`"ipMasq": true, "fastPath": "`+path+`"`))
			transferOnAllPaths(t, n, func(t *testing.T, client, server *testenv.Namespace, listen, dial netip.AddrPort) {
				for _, link := range must(rtnl.Links(n.node().Netlink())) {
					if link.Type() == "veth" {
						testenv.Must(t, n.node().SetOffloads(link.Attrs().Name, false))
					}
				}
				serve(t, server, "udp", listen)
				askOften(t, connect(t, client, "udp", netip.AddrPort{}, dial), server)
				upload(sizeOf(mebibyte))(t, client, server, listen, dial)
				download(sizeOf(mebibyte))(t, client, server, listen, dial)
			})
		})
	}
}

// receive is testenv.Transfer in the other direction.
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
		return fmt.Errorf("SHA-256 of the data: sent %x, received %x", sent.Sum(nil), received.Sum(nil))
	}
	return nil
}
