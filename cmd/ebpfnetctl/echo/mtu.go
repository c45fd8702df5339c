package echo

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// ErrSilent is wrapped by the error for a link that takes less than the others and says nothing of it: what is longer
// has no answer, and its sender does not learn why.
var ErrSilent = errors.New("a link that takes less says nothing of it")

// PathMTU returns the size of the longest IP packets that addr answers, up to most; with ErrSilent, too.
func PathMTU(addr netip.Addr, most int, wait time.Duration) (size int, err error) {
	const links = 8 // each of which may be smaller than those before

	for range links {
		if size, err = knownMTU(addr); err != nil {
			return 0, err
		}
		size = min(size, most)
		if _, err = ask(addr, size-headersOf(addr), wait); err == nil {
			return size, nil
		}
		if !errors.Is(err, unix.EMSGSIZE) {
			return search(addr, size, err, wait)
		}
	}
	return 0, err
}

// search finds the longest packets that are answered, where those of some size are not.
func search(addr netip.Addr, unanswered int, why error, wait time.Duration) (size int, err error) {
	const atOnce = 32

	size = headersOf(addr) + small
	if _, err := ask(addr, small, wait); err != nil {
		return 0, err
	}
	for end := unanswered; end-size > 1; {
		step := (end - size + atOnce - 1) / atOnce
		longest, err := longest(addr, size+step, end, step, wait)
		if err != nil {
			return 0, err
		}
		size = max(size, longest)
		end = min(end, size+step)
	}
	return size, fmt.Errorf("packets of %d bytes: %w; %w", unanswered, why, ErrSilent)
}

// longest sends packets of sizes from first up to end, and returns the longest one that is answered, or 0.
func longest(addr netip.Addr, first, end, step int, wait time.Duration) (size int, err error) {
	conn, err := dial(addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	answers := map[int][]byte{} // by the packets' sizes
	for range tries {
		if err := conn.SetDeadline(time.Now().Add(wait)); err != nil {
			return 0, err
		}
		for bytes := first; bytes < end; bytes += step {
			request, answer := message(addr, bytes-headersOf(addr))
			answers[bytes] = answer
			if _, err := conn.Write(request); err != nil && !errors.Is(err, unix.EMSGSIZE) {
				return 0, err
			}
		}
		for buffer := make([]byte, end); size+step < end; {
			n, _, err := conn.ReadFromIP(buffer)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				break
			}
			bytes := n + headersOf(addr) - headersICMP
			if answer := answers[bytes]; err == nil && answer != nil && isAnswer(buffer, answer) {
				size = max(size, bytes)
			}
		}
	}
	return size, nil
}

func headersOf(addr netip.Addr) int {
	if addr.Is4() {
		return headers4
	}
	return headers6
}

// knownMTU returns what the kernel knows of the way.
func knownMTU(addr netip.Addr) (mtu int, err error) {
	conn, err := dial(addr)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	level, option := unix.IPPROTO_IPV6, unix.IPV6_MTU
	if addr.Is4() {
		level, option = unix.IPPROTO_IP, unix.IP_MTU
	}
	err = control(conn, func(fd int) (err error) {
		mtu, err = unix.GetsockoptInt(fd, level, option)
		return err
	})
	return mtu, err
}
