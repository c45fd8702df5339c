// Package drops follows dropped packets, one by one: those of our programs, and those of the host's stack on
// containers' packets.
//
// The programs report nothing until a [Reader] takes a lease of a few seconds in a map; the lease of a reader that
// is killed ends soon. Reports go through a ring buffer, up to a limit; the programs count the rest.
package drops

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/flock"
	"github.com/ebpfnet/ebpfnet/maps"
)

// MaxOwners is how many attachments the programs can select.
const MaxOwners = len(bpf.DropReader{}.Owner)

// MaxBytes is how many of a packet's first bytes are kept.
const MaxBytes = len(bpf.DropEvent{}.Bytes)

// Filter says which drops are reported.
type Filter struct {
	Owners  []loader.Owner // at most MaxOwners; none: of all containers, and of none
	Reasons []maps.Reason  // of our programs; nil: all
	Stack   *StackFilter   // nil: not those of the stack
	Limit   uint32         // per second, CPU and reason
}

// Reader is the one process that reads drops.
type Reader struct {
	StackErr error // why drops of the stack are not reported

	datapath *loader.Datapath
	lock     *flock.Lock
	pins     fs.FileInfo // the directory that unloading removes
	ring     *ringbuf.Reader
	stack    io.Closer // nil: not attached
	state    bpf.DropReader
	began    uint64   // ns since boot
	before   []uint64 // what was left out, by key of drop_limits
}

// lease is for how long the programs report to a reader that is gone. Renew must be called more often.
const lease = 3 * time.Second

// Open takes the lease. If another process has it, the error names that process. The caller must call Close.
func Open(ctx context.Context, datapath *loader.Datapath, filter Filter) (*Reader, error) {
	if err := datapath.OpenOnDemand(bpf.MapDropReader, bpf.MapDropLimits, bpf.MapDropEvents); err != nil {
		return nil, err
	}
	r := &Reader{datapath: datapath, began: sinceBoot(), state: stateOf(filter)}
	if err := r.takeLock(ctx); err != nil {
		return nil, err
	}
	var err error
	if r.pins, err = os.Stat(datapath.Dir()); err != nil {
		return nil, errors.Join(err, r.Close())
	}
	if r.ring, err = ringbuf.NewReader(datapath.DropEvents); err == nil {
		_, err = r.LeftOut() // from here on
	}
	if err == nil {
		r.ring.SetDeadline(time.Unix(1, 0)) // nobody waits on the ring: Read takes what is there
		r.StackErr = r.attachStack(filter.Stack)
		_, err = r.Renew()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read drops: %w", err), r.Close())
	}
	return r, nil
}

func (r *Reader) attachStack(s *StackFilter) error {
	if s == nil {
		return nil
	}
	config, err := s.config()
	if err == nil {
		r.stack, err = r.datapath.AttachStackDrops(config)
	}
	return err
}

func stateOf(filter Filter) bpf.DropReader {
	state := bpf.DropReader{Limit: filter.Limit, Pid: uint32(os.Getpid()), Reasons: ^uint64(0)}
	for i, owner := range filter.Owners {
		state.Owner[i] = uint64(owner)
	}
	switch {
	case filter.Reasons != nil:
		state.Reasons = 0
		for _, reason := range filter.Reasons {
			state.Reasons |= 1 << reason
		}
	case filter.Stack != nil && filter.Stack.Reason != "":
		state.Reasons = 0
	}
	return state
}

// takeLock: a ring buffer has one reader.
func (r *Reader) takeLock(ctx context.Context) (err error) {
	r.lock, err = r.datapath.TryDropReader(ctx)
	if err != nil || r.lock != nil {
		return err
	}
	var holder bpf.DropReader
	who := ""
	if err := r.datapath.DropReader.Lookup(uint32(0), &holder); err == nil && holder.Pid != 0 {
		who = fmt.Sprintf(" (process %d)", holder.Pid)
	}
	return fmt.Errorf("another reader%s follows drops, and only one can: end it first; the node agent is one with --log-denied", who)
}

// Renew renews the lease; it may run beside Read and LeftOut. If the lease has ended, it returns how long ago. An
// upgrade keeps the maps and so the reader; Renew fails after an unload, because the reader would wait forever.
func (r *Reader) Renew() (missed time.Duration, err error) {
	if now, err := os.Stat(r.datapath.Dir()); err != nil || !os.SameFile(now, r.pins) {
		return 0, errors.New("the datapath was unloaded: follow drops anew once it is loaded")
	}
	now := sinceBoot()
	if r.state.Until != 0 && r.state.Until < now {
		missed = time.Duration(now - r.state.Until)
	}
	r.state.Until = now + uint64(lease)
	return missed, r.datapath.DropReader.Put(uint32(0), r.state)
}

// Read calls report for each drop in the ring, at most as many as fit: under a flood the caller's pace is the limit.
func (r *Reader) Read(report func(*bpf.DropEvent)) error {
	var record ringbuf.Record
	var event bpf.DropEvent
	for range r.ring.BufferSize() / binary.Size(event) {
		err := r.ring.ReadInto(&record)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return nil
		}
		if err == nil {
			err = binary.Read(bytes.NewReader(record.RawSample), binary.NativeEndian, &event)
		}
		if err != nil {
			return fmt.Errorf("read drops: %w", err)
		}
		if event.Time >= r.began { // a reader that was killed may have left others
			report(&event)
		}
	}
	return nil
}

// LeftOut returns how many drops were left out since the last call, by key of drop_limits.
func (r *Reader) LeftOut() (map[uint32]uint64, error) {
	since := map[uint32]uint64{}
	before := r.before
	r.before = make([]uint64, r.datapath.DropLimits.MaxEntries())
	for key := range r.before {
		var perCPU []bpf.DropLimit
		if err := r.datapath.DropLimits.Lookup(uint32(key), &perCPU); err != nil {
			return nil, fmt.Errorf("read what was left out: %w", err)
		}
		for _, limit := range perCPU {
			r.before[key] += limit.LeftOut
		}
		if before != nil && r.before[key] > before[key] {
			since[uint32(key)] = r.before[key] - before[key]
		}
	}
	return since, nil
}

// LeftOut is a line of JSON about drops between others.
type LeftOut struct {
	Time     time.Time         `json:"time"`
	LeftOut  uint64            `json:"leftOut"`
	ByReason map[string]uint64 `json:"byReason"`
}

// LeftOutOf returns the line for what a reader has left out.
func LeftOutOf(counts map[uint32]uint64) LeftOut {
	l := LeftOut{Time: time.Now().UTC(), ByReason: map[string]uint64{}}
	for key, count := range counts {
		name := "stack"
		if key != bpf.DropStack {
			name = maps.Reason(key).Name()
		}
		l.LeftOut += count
		l.ByReason[name] = count
	}
	return l
}

// Stop ends the reports. Read still returns what is in the ring.
func (r *Reader) Stop() error {
	var errs []error
	if r.stack != nil {
		errs = append(errs, r.stack.Close())
		r.stack = nil
	}
	return errors.Join(append(errs, r.datapath.DropReader.Put(uint32(0), bpf.DropReader{}))...)
}

// Close closes everything that Open has opened.
func (r *Reader) Close() error {
	errs := []error{r.Stop()}
	if r.ring != nil {
		errs = append(errs, r.ring.Close())
	}
	return errors.Join(append(errs, r.lock.Release())...)
}

// sinceBoot returns the time of the programs, in ns.
func sinceBoot() uint64 {
	var now unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &now) // never fails
	return uint64(now.Nano())
}
