package ipam

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader/flock"
)

var (
	// ErrExhausted is wrapped when a range set has no free address.
	ErrExhausted = errors.New("no free address")
	// ErrTaken is wrapped when another attachment holds a requested address; the
	// message names it.
	ErrTaken = errors.New("requested address is taken")
	// ErrDuplicate is wrapped when the attachment already holds an address from this
	// network; the message names it.
	ErrDuplicate = errors.New("attachment already holds an address")
)

// Address is one address of an attachment.
type Address struct {
	Prefix  netip.Prefix // the address with its subnet's length
	Gateway netip.Addr
}

// Result is what IPAM says about an attachment (CNI specification, section 5, the
// abbreviated success of IPAM plugins).
type Result struct {
	Addresses []Address // one per range set, in their order
	Routes    []*types.Route
	DNS       types.DNS
}

// Host is what a pool may know of its options beside the reservations.
type Options struct {
	// IndexDir is where indexes of reservations are kept, on a file system that a reboot
	// empties. Without, each operation reads all reservations.
	IndexDir string
	// Lives says of an attachment whose reservation is from an earlier boot that it is
	// there all the same. Nil knows of none.
	Lives func(Attachment) bool
	Log   *slog.Logger // nil discards
}

// Pool hands out the addresses of one network. It keeps nothing in memory; each method
// locks the network's directory, and wraps flock.ErrBusy if that takes until the
// context ends.
type Pool struct {
	cfg     *Config
	options Options
	log     *slog.Logger
	boot    func() string // the id of this boot
}

// Open returns the pool of cfg's network. It does no I/O.
func Open(cfg *Config, options Options) *Pool {
	log := options.Log
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Pool{cfg: cfg, options: options, log: log, boot: readBootID}
}

// Reserve gives a one address from each range set, the requested ones where there are
// any, or nothing at all. What a holds from an earlier boot it keeps. Errors wrap
// ErrExhausted, ErrTaken, ErrDuplicate or flock.ErrBusy, or are those of reading and
// writing files.
func (p *Pool) Reserve(ctx context.Context, a Attachment) (*Result, error) {
	return p.reserve(ctx, a, func(s *store, held []record) error {
		if slices.ContainsFunc(held, func(r record) bool { return !s.isDead(r) }) {
			return fmt.Errorf("%w: %s has %v in %s", ErrDuplicate, a, addrsOf(held), s.dir)
		}
		return nil
	})
}

// Replace is Reserve where the caller knows that what a holds is from a container that is
// gone: a keeps those of its addresses that the ranges still have.
func (p *Pool) Replace(ctx context.Context, a Attachment) (*Result, error) {
	return p.reserve(ctx, a, func(*store, []record) error { return nil })
}

// Release frees all that a holds from this network, also outside the configured
// ranges. It succeeds when there is nothing to free, and goes on after errors.
func (p *Pool) Release(ctx context.Context, a Attachment) error {
	s, err := p.open(ctx, flock.Exclusive)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.close()

	held, err := s.heldBy(a)
	if err != nil {
		return err
	}
	if err := s.release(held); err != nil {
		return err
	}
	s.forget(a)
	for _, r := range held {
		s.forget(r.holder)
	}
	return nil
}

// Reserved returns the addresses that a holds, in ascending order.
func (p *Pool) Reserved(ctx context.Context, a Attachment) ([]netip.Addr, error) {
	s, err := p.open(ctx, flock.Shared)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer s.close()

	held, err := s.heldBy(a)
	if err != nil {
		return nil, err
	}
	return addrsOf(held), nil
}

// Available returns nil if Reserve can succeed: each range set has an address that is free or
// of an earlier boot, and the directory, which it creates as Reserve would, can be written to.
func (p *Pool) Available(ctx context.Context) error {
	s, err := p.create(ctx)
	if err != nil {
		return err
	}
	defer s.close()

	errs := []error{s.probe()}
	for i := range p.cfg.Ranges {
		_, err := p.search(ctx, s, i, s.isFree, s.isReclaimable)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func addrsOf(records []record) []netip.Addr {
	var addrs []netip.Addr
	for _, r := range records {
		addrs = append(addrs, r.addr)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}
