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

// workload is one kind of traffic.
type workload struct {
	name  string
	title string
	unit  string
	// run generates the traffic for one slice and returns its rate.
	run func(ends, time.Duration) (sample, error)
}

const streamName = "tcp-stream"

var workloads = []workload{
	{"udp-packets", "UDP packets of 64 B", "packets/s", udpPackets},
	{"udp-rr", "UDP round trip", "round trips/s", udpRoundTrip},
	{"udp-dns", "DNS-like UDP", "questions/s", udpQuestion},
	{"tcp-rr", "TCP round trip", "round trips/s", tcpRoundTrip},
	{"tcp-crr", "connect-request-close", "connections/s", connectRequestClose},
	{"tcp-rr-64", "64 × TCP round trip", "round trips/s", manyRoundTrips},
	{"tcp-crr-64", "64 × connect-request-close", "connections/s", manyConnections},
	{streamName, "TCP stream", "bytes/s", tcpStream},
}

func workloadTitle(name string) string {
	for _, w := range workloads {
		if w.name == name {
			return w.title
		}
	}
	return name
}

// ends are the two ends of traffic.
type ends struct {
	client, server *testenv.Namespace
	// listen is the server's address, dial the one that the client connects to.
	listen, dial netip.AddrPort
	cpu          int // runs both
}

// sample is the result of one slice.
type sample struct {
	rate           float64       // per second
	p50, p99, p999 time.Duration // of round trips
	lost           int           // UDP packets
}

// garbageLimit is where garbage is collected even while that is paused: ADDs with 10,000 rules make gigabytes. Traffic makes little.
const garbageLimit = 2 << 30

// pauseGC collects garbage now and, below the limit, not again until resume is called.
func pauseGC() (resume func()) {
	runtime.GC()
	percent, limit := debug.SetGCPercent(-1), debug.SetMemoryLimit(garbageLimit)
	return func() { debug.SetGCPercent(percent); debug.SetMemoryLimit(limit) }
}

// onCPU runs one end on its own thread, in the namespace and on the CPU. It blocks the signal with
// which Go's scheduler preempts a thread every 10 ms: no socket timeout would ever expire.
func onCPU(ns *testenv.Namespace, cpu int, end func() error) error {
	return ns.Do(func() error {
		var only unix.CPUSet
		only.Set(cpu)
		if err := unix.SchedSetaffinity(0, &only); err != nil {
			return fmt.Errorf("pin to CPU %d: %w", cpu, err)
		}
		var preemption unix.Sigset_t
		preemption.Val[(unix.SIGURG-1)/64] = 1 << ((unix.SIGURG - 1) % 64)
		if err := unix.PthreadSigmask(unix.SIG_BLOCK, &preemption, nil); err != nil {
			return fmt.Errorf("block SIGURG: %w", err)
		}
		return end()
	})
}

// clientAndServer starts the server, and the client once the server listens. The server must end
// when the client has closed its socket, or after waitLimit.
func clientAndServer(e ends, kind int, server func(listener int) error, client func() error) error {
	listening, served := make(chan struct{}), make(chan error, 1)
	go func() {
		served <- onCPU(e.server, e.cpu, func() error {
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
	errClient := onCPU(e.client, e.cpu, client)
	errServer := <-served
	if errClient != nil {
		errClient = fmt.Errorf("client: %w", errClient)
	}
	if errServer != nil {
		errServer = fmt.Errorf("server: %w", errServer)
	}
	return errors.Join(errClient, errServer)
}

// warmUp is the time at the start of a slice that is not measured.
func warmUp(slice time.Duration) time.Duration { return slice / 8 }

// meter measures the repeated actions of a client.
type meter struct {
	*clock
	histogram
}

func newMeter(slice, part time.Duration) *meter { return &meter{clock: newClock(slice, part)} }

// run repeats an action until the slice is over. Actions that start in the warm-up do not count.
func (m *meter) run(action func() error) (sample, error) {
	last := time.Now()
	for !m.over(last) {
		if err := action(); err != nil {
			return sample{}, err
		}
		now := time.Now()
		m.done(last, now)
		last = now
	}
	return m.sample()
}

// done counts an action.
func (m *meter) done(began, now time.Time) {
	if !began.Before(m.begin) {
		m.histogram.add(now.Sub(began))
	}
	m.clock.add(now, 1)
}

func (m *meter) sample() (sample, error) {
	rate, err := m.rate()
	return sample{rate: rate, p50: m.quantile(0.5), p99: m.quantile(0.99), p999: m.quantile(0.999)}, err
}

// clock measures a rate as the median over the parts of a slice, so that parts in which the
// machine did something else are ignored.
type clock struct {
	begin, end time.Time
	part       time.Duration
	from       time.Time // start of the current part; zero before the first
	amount     int
	rates      []float64
}

const (
	// shortPart is much shorter than the scheduler's time slice, so that most parts are
	// undisturbed even if other processes want the CPU.
	shortPart = 250 * time.Microsecond
	// longPart is for connections, part of whose memory the kernel frees later.
	longPart = time.Millisecond
)

func newClock(slice, part time.Duration) *clock {
	begin := time.Now().Add(warmUp(slice))
	return &clock{begin: begin, end: begin.Add(slice), part: part, rates: make([]float64, 0, slice/part+1)}
}

// add counts the amount done since the last call.
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

// over reports whether the slice is over. One without a complete part continues for up to waitLimit.
func (c *clock) over(now time.Time) bool {
	return now.After(c.end) && (len(c.rates) > 0 || now.After(c.end.Add(waitLimit)))
}

func (c *clock) rate() (float64, error) {
	if len(c.rates) == 0 {
		return 0, errors.New("no complete part in the slice")
	}
	return quantile(c.rates, 0.5), nil
}
