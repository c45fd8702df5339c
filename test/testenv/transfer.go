package testenv

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
)

// Transfer sends size pseudo-random bytes over TCP from one namespace to another and compares the
// SHA-256 sums of both ends. The server listens on listen. The client connects to dial, which differs
// from listen if the datapath translates the connection; the zero dial means listen. The same seed
// gives the same bytes.
func Transfer(ctx context.Context, from, to *Namespace, listen, dial netip.AddrPort, size int64, seed uint64) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	listener, err := to.Listen(ctx, listen)
	if err != nil {
		return err
	}
	defer listener.Close()
	defer context.AfterFunc(ctx, func() { listener.Close() })()
	if !dial.IsValid() {
		dial = addrPort(listener.Addr())
	}

	received := make(chan error, 1)
	go func() {
		err := receive(ctx, listener)
		received <- err
		if err != nil {
			cancel() // otherwise the sender waits forever
		}
	}()
	sendErr := send(ctx, from, dial, size, seed)
	if sendErr != nil {
		cancel() // otherwise the receiver waits forever
	}
	if err := errors.Join(sendErr, <-received); err != nil {
		return fmt.Errorf("transfer %d bytes from %s to %s at %s: %w", size, from.Name, to.Name, dial, err)
	}
	return nil
}

// send sends the bytes, closes its direction, and compares the sum that the receiver replies with its
// own.
func send(ctx context.Context, from *Namespace, dial netip.AddrPort, size int64, seed uint64) error {
	conn, err := from.Dial(ctx, "tcp", dial)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer conn.Close()
	defer abortOn(ctx, conn)()

	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	hash := sha256.New()
	source := io.TeeReader(io.LimitReader(rand.NewChaCha8(key), size), hash)
	if n, err := io.Copy(conn, source); err != nil {
		return fmt.Errorf("send, after %d bytes: %w", n, contextError(ctx, err))
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		return fmt.Errorf("end sending: %w", err)
	}
	sum, err := io.ReadAll(conn)
	if err != nil {
		return fmt.Errorf("receive sum: %w", contextError(ctx, err))
	}
	if want := hash.Sum(nil); !bytes.Equal(sum, want) {
		return fmt.Errorf("corrupted data: SHA-256 received %x, sent %x", sum, want)
	}
	return nil
}

// receive reads one connection to its end and replies with the sum.
func receive(ctx context.Context, listener net.Listener) error {
	conn, err := listener.Accept()
	if err != nil {
		return fmt.Errorf("accept: %w", contextError(ctx, err))
	}
	defer conn.Close()
	defer abortOn(ctx, conn)()

	hash := sha256.New()
	if n, err := io.Copy(hash, conn); err != nil {
		return fmt.Errorf("receive, after %d bytes: %w", n, contextError(ctx, err))
	}
	if _, err := conn.Write(hash.Sum(nil)); err != nil {
		return fmt.Errorf("send sum: %w", contextError(ctx, err))
	}
	return nil
}
