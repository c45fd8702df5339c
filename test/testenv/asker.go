package testenv

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Asker asks one question after the other over a client's socket. Nothing repeats a datagram, so a question without an
// answer means that a packet was lost. Then the asker asks no more.
type Asker struct {
	client          *Client
	name            string
	pause, patience time.Duration
	replies         atomic.Uint64
	stopping        atomic.Bool
	ended           chan struct{}
	err             error // set when it has ended
}

// KeepAsking starts an asker, which pauses after each answer. The end of the test stops it. Only [Askers.Lossless] and
// [Askers.More] return a loss.
func (c *Client) KeepAsking(tb TB, name string, pause time.Duration) *Asker {
	tb.Helper()
	a := &Asker{client: c, name: name, pause: pause, patience: Timeout / 2}
	a.start()
	tb.Cleanup(a.stop)
	return a
}

func (a *Asker) start() {
	a.err, a.ended = nil, make(chan struct{})
	go func() {
		defer close(a.ended)
		for !a.stopping.Load() {
			ctx, cancel := timeoutContext(a.patience)
			_, err := a.client.Ask(ctx, "still there?")
			cancel()
			if err != nil {
				a.err = fmt.Errorf("%s: lost a packet after %d replies: %w", a.name, a.replies.Load(), err)
				return
			}
			a.replies.Add(1)
			time.Sleep(a.pause)
		}
	}()
}

func (a *Asker) stop() {
	a.stopping.Store(true)
	<-a.ended
}

func (a *Asker) hasEnded() bool {
	select {
	case <-a.ended:
		return true
	default:
		return false
	}
}

// Askers are some that run at the same time.
type Askers []*Asker

// Lossless takes a step while all ask, and wants each question to be answered. If one is not, and the queues of the CPUs
// have dropped packets meanwhile, that says nothing about the step: those that have lost a packet go on, and the step is
// repeated, with a higher attempt. A step may call More.
func (all Askers) Lossless(tb TB, step func(attempt int) error) error {
	tb.Helper()
	return WithoutBacklogDrops(tb, func(attempt int) error {
		for _, a := range all {
			if a.hasEnded() {
				a.start()
			}
		}
		return errors.Join(step(attempt), all.More(2)) // the second one to a question that is younger than the step
	})
}

// More waits until each asker has got so many replies more, or one has lost a packet.
func (all Askers) More(replies uint64) error {
	want := make([]uint64, len(all))
	for i, a := range all {
		want[i] = a.replies.Load() + replies
	}
	for i, a := range all {
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		for a.replies.Load() < want[i] {
			select {
			case <-a.ended:
				return all.losses()
			case <-ticker.C:
			}
		}
	}
	return nil
}

// losses returns what the askers that have ended have lost.
func (all Askers) losses() error {
	var errs []error
	for _, a := range all {
		if a.hasEnded() {
			errs = append(errs, a.err)
		}
	}
	return errors.Join(errs...)
}

// Stop waits for the end of the last questions. Then the clients can be used otherwise.
func (all Askers) Stop() {
	for _, a := range all {
		a.stopping.Store(true)
	}
	for _, a := range all {
		a.stop()
	}
}
