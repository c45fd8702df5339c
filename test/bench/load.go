package main

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// cpu runs both ends of all traffic, otherCPU the load. They are the same on a
// machine with one.
var cpu, otherCPU int

// chooseCPUs takes the last CPU that this process may use for measurements, since interrupts tend to be
// on the first, and the one before for the rest.
func chooseCPUs() error {
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), 8)) // every end occupies one while it waits
	var allowed unix.CPUSet
	if err := unix.SchedGetaffinity(0, &allowed); err != nil {
		return err
	}
	cpu, otherCPU = 0, 0
	for i := range len(allowed) * 64 {
		if allowed.IsSet(i) {
			otherCPU, cpu = cpu, i
		}
	}
	if allowed.Count() == 1 {
		otherCPU = cpu
	}
	return nil
}

// sample runs traffic under the load of a setup's scale.
func (r *run) sample(s *setup, t traffic) (sample, error) {
	switch {
	case s.Pairs > 0:
		return twice(t, r.plan.slice)
	case s.PerSecond > 0:
		return r.beside(s.PerSecond, t)
	}
	return t.workload.run(t.ends, r.plan.slice)
}

// beside runs traffic while connections are opened, again if something else has taken their CPU.
func (r *run) beside(perSecond int, t traffic) (got sample, err error) {
	for range 3 {
		stop := r.background(perSecond)
		got, err = t.workload.run(t.ends, r.plan.slice)
		if err = errors.Join(err, stop()); !errors.Is(err, errBehind) {
			break
		}
	}
	return got, err
}

// twice measures two pairs of ends at once, each on its own CPU, and returns the mean of their rates.
func twice(t traffic, slice time.Duration) (sample, error) {
	second := t.ends
	second.cpu = otherCPU
	second.listen, second.dial = nextPort(second.listen), nextPort(second.dial)
	other, otherErr := sample{}, make(chan error, 1)
	go func() {
		var err error
		other, err = t.workload.run(second, slice)
		otherErr <- err
	}()
	got, err := t.workload.run(t.ends, slice)
	err = errors.Join(err, <-otherErr)
	got.rate = (got.rate + other.rate) / 2
	got.lost += other.lost
	return got, err
}

func nextPort(p netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(p.Addr(), p.Port()+1) }

// background opens connections on the other CPU until stop is called, which says whether it kept pace.
func (r *run) background(perSecond int) (stop func() error) {
	end, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- onCPU(r.others.Namespace, otherCPU, func() error { return openAtRate(perSecond, end) })
	}()
	return func() error {
		close(end)
		return <-ended
	}
}

var errBehind = errors.New("the background opened too few")

// openAtRate opens as many connections per second, a few every millisecond.
func openAtRate(perSecond int, end <-chan struct{}) error {
	o, err := newOpener()
	if err != nil {
		return err
	}
	defer o.close()
	o.next = int(time.Now().UnixNano()/1000) & (1<<29 - 1) // not those of the last time
	begin, opened := time.Now(), 0
	for {
		select {
		case <-end:
			if due := due(perSecond, begin); opened < due/2-few {
				return fmt.Errorf("%w: %d connections, expected %d", errBehind, opened, due)
			}
			return nil
		default:
		}
		if opened >= due(perSecond, begin) {
			continue // a CPU of its own: waiting would cost more
		}
		if err := o.open(); err != nil {
			return err
		}
		opened++
	}
}

// few connections may be late, because the other CPU may be busy at the end.
const few = 100

func due(perSecond int, since time.Time) int {
	return int(time.Since(since).Seconds() * float64(perSecond))
}

// underLoad returns the main setup of a variant for measurements under a load. The load is always that
// of ebpfnet, also beside a bare veth.
func (r *run) underLoad(p plannedSetup) (*setup, error) {
	if cpu == otherCPU {
		return nil, errors.New("needs a second CPU")
	}
	for _, s := range r.setups {
		if s.variant.name != p.variant.name || !s.isMain() {
			continue
		}
		same := *s
		same.scale, same.attachments = p.scale, nil
		return &same, r.addOthers()
	}
	return nil, fmt.Errorf("needs %s", p.variant.title)
}

// addOthers attaches the pod that opens connections in the background.
func (r *run) addOthers() error {
	if r.others != nil {
		return nil
	}
	for _, s := range r.setups {
		if s.variant.name == establishedName && s.isMain() {
			r.others = s.newOthers(r.Machine)
			return attach(r.others)
		}
	}
	return fmt.Errorf("needs %s, which opens the connections", variantTitle(establishedName))
}
