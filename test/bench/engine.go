package main

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// work is one kind of traffic to be measured.
type work struct {
	name  string
	title string
	unit  string
	// run does it for a time, and returns how much of it was done in a second.
	run func(ends, time.Duration) (sample, error)
}

var works = []work{
	{"udp-packets", "UDP packets of 64 B", "packets/s", udpPackets},
	{"udp-rr", "UDP round trip", "round trips/s", udpRoundTrip},
	{"tcp-rr", "TCP round trip", "round trips/s", tcpRoundTrip},
	{"tcp-crr", "connect-request-close", "connections/s", connectRequestClose},
	{"tcp-stream", "TCP stream", "bytes/s", tcpStream},
}

func titleOfWork(name string) string {
	for _, w := range works {
		if w.name == name {
			return w.title
		}
	}
	return name
}

// ends are where traffic is from and where it goes.
type ends struct {
	client, server *testenv.Namespace
	// listen is the server's address, dial what the client knows it by.
	listen, dial netip.AddrPort
}

// sample is what one slice of a measurement gave.
type sample struct {
	rate     float64       // per second
	p50, p99 time.Duration // of what has an answer
	lost     int           // of what is not repeated by the kernel
}

// cpu is where both ends run.
var cpu int

// quiet prepares this process for measurements, and returns what ends that. Memory is cleaned up
// before, and not meanwhile.
func quiet() (loud func()) {
	runtime.GC()
	old := debug.SetGCPercent(-1)
	return func() { debug.SetGCPercent(old) }
}

// on runs one end on a thread of its own in a namespace, on the CPU, and without the signal by which
// Go's scheduler interrupts a thread every 10 ms: no wait would ever come to its limit.
func on(ns *testenv.Namespace, end func() error) error {
	return ns.Do(func() error {
		var only unix.CPUSet
		only.Set(cpu)
		if err := unix.SchedSetaffinity(0, &only); err != nil {
			return fmt.Errorf("run on CPU %d: %w", cpu, err)
		}
		var preemption unix.Sigset_t
		preemption.Val[(unix.SIGURG-1)/64] = 1 << ((unix.SIGURG - 1) % 64)
		if err := unix.PthreadSigmask(unix.SIG_BLOCK, &preemption, nil); err != nil {
			return fmt.Errorf("block SIGURG: %w", err)
		}
		return end()
	})
}

// lastCPU returns the last CPU that this process may use: interrupts tend to be on the first.
func lastCPU() (int, error) {
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return 0, err
	}
	last := 0
	for i := range len(allowed) * 64 {
		if allowed.IsSet(i) {
			last = i
		}
	}
	return last, nil
}

// betweenTwo has a server that listens, and a client that starts when it does. The server must
// end when the client has closed its socket, or when patience ends.
func betweenTwo(e ends, kind int, server func(listener int) error, client func() error) error {
	listening, served := make(chan struct{}), make(chan error, 1)
	go func() {
		served <- on(e.server, func() error {
			fd, err := bindSocket(kind, addressOf(e.listen))
			if err != nil {
				return fmt.Errorf("listen on %s: %w", e.listen, err)
			}
			defer closeSocket(fd)
			close(listening)
			return server(fd)
		})
	}()
	select {
	case <-listening:
	case err := <-served:
		return err
	}
	clientErr := on(e.client, client)
	serverErr := <-served
	if clientErr != nil {
		clientErr = fmt.Errorf("client: %w", clientErr)
	}
	if serverErr != nil {
		serverErr = fmt.Errorf("server: %w", serverErr)
	}
	return errors.Join(clientErr, serverErr)
}

// warmUp is how long work is done before it counts.
func warmUp(slice time.Duration) time.Duration { return slice / 8 }

// meter measures repeated actions of a client.
type meter struct {
	*clock
	histogram
}

func newMeter(slice, part time.Duration) *meter { return &meter{clock: newClock(slice, part)} }

// run repeats an action until the end, and tells of those that began in time.
func (m *meter) run(action func() error) (sample, error) {
	last := time.Now()
	for !m.over(last) {
		if err := action(); err != nil {
			return sample{}, err
		}
		now := time.Now()
		if !last.Before(m.begin) {
			m.histogram.add(now.Sub(last))
		}
		m.clock.add(now, 1)
		last = now
	}
	rate, err := m.rate()
	return sample{rate: rate, p50: m.quantile(0.5), p99: m.quantile(0.99)}, err
}

// clock tells how much is done in a second: the median of the parts of a slice, so that other
// work of the machine that comes in between does not count.
type clock struct {
	begin, end time.Time
	part       time.Duration
	from       time.Time // when the part at hand began; zero before the first
	amount     int
	rates      []float64
}

const (
	// shortPart is much less than the scheduler gives to one that is always ready, so that most
	// parts are undisturbed even where others want the CPU as well.
	shortPart = 250 * time.Microsecond
	// longPart is for connections, some of whose memory is freed later.
	longPart = time.Millisecond
)

func newClock(slice, part time.Duration) *clock {
	begin := time.Now().Add(warmUp(slice))
	return &clock{begin: begin, end: begin.Add(slice), part: part, rates: make([]float64, 0, slice/part+1)}
}

// add counts what was done from the last call until now.
func (c *clock) add(now time.Time, amount int) {
	if c.from.IsZero() {
		if !now.Before(c.begin) {
			c.from = now
		}
		return
	}
	c.amount += amount
	if took := now.Sub(c.from); took >= c.part && len(c.rates) < cap(c.rates) {
		c.rates = append(c.rates, float64(c.amount)/took.Seconds())
		c.from, c.amount = now, 0
	}
}

// over says whether the slice is. One in which nothing was finished goes on for a while.
func (c *clock) over(now time.Time) bool {
	return now.After(c.end) && (len(c.rates) > 0 || now.After(c.end.Add(patience)))
}

func (c *clock) rate() (float64, error) {
	if len(c.rates) == 0 {
		return 0, errors.New("too little was done in time")
	}
	return quantile(c.rates, 0.5), nil
}
