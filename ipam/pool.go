package ipam

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/loader/flock"
)

var (
	// ErrExhausted is wrapped if a range set has no free address.
	ErrExhausted = errors.New("no free address")
	// ErrTaken is wrapped if another attachment holds a requested address; the message
	// names that attachment.
	ErrTaken = errors.New("requested address is taken")
	// ErrDuplicate is wrapped if the attachment already holds an address of this
	// network; the message names the address.
	ErrDuplicate = errors.New("attachment already holds an address")
)

// Address is one address of an attachment.
type Address struct {
	Prefix  netip.Prefix // the address with its subnet's prefix length
	Gateway netip.Addr
}

// Result is the IPAM part of an attachment's result (CNI specification, section 5,
// "Delegated plugins (IPAM)").
type Result struct {
	Addresses []Address // one per range set, in the same order
	Routes    []*types.Route
	DNS       types.DNS
}

// Options adapt a pool to its host.
type Options struct {
	// IndexDir is the directory for indexes of reservations, on a file system that a
	// reboot empties. If "", each operation reads all reservations.
	IndexDir string
	// Alive reports whether an attachment exists although its reservation is from an
	// earlier boot. Nil: none does.
	Alive func(Attachment) bool
	// InUse returns an error if somebody without a reservation has an address, which is
	// then not assigned. Nil: nobody has.
	InUse func(netip.Addr) error
	Log   *slog.Logger // nil discards
}

// Pool assigns the addresses of one network. It keeps nothing in memory. Each method
// locks the network's directory; if the context ends before that succeeds, the error
// wraps flock.ErrBusy.
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

// Reserve assigns a one address of each range set, the requested one if any, or fails
// and assigns none. Addresses that a holds from an earlier boot are assigned again. Errors
// wrap ErrExhausted, ErrTaken, ErrDuplicate or flock.ErrBusy, or come from the file system.
func (p *Pool) Reserve(ctx context.Context, a Attachment) (*Result, error) {
	return p.reserve(ctx, a, func(s *store, held []record) error {
		if slices.ContainsFunc(held, func(r record) bool { return !s.isDead(r) }) {
			return fmt.Errorf("%w: %s holds %v in %s", ErrDuplicate, a, addrsOf(held), s.dir)
		}
		return nil
	})
}

// Replace is Reserve for a caller that knows that a's reservations are those of a deleted
// container: a keeps those of its addresses that are still in the ranges.
func (p *Pool) Replace(ctx context.Context, a Attachment) (*Result, error) {
	return p.reserve(ctx, a, func(*store, []record) error { return nil })
}

// Release frees all addresses that a holds in this network, also those outside the
// configured ranges. It succeeds if there are none, and continues after errors.
func (p *Pool) Release(ctx context.Context, a Attachment) error {
	return p.ifExists(ctx, flock.Exclusive, func(s *store) error {
		held, err := s.heldBy(a)
		if err != nil {
			return err
		}
		if err := s.release(held); err != nil {
			return err
		}
		s.dropFromIndex(a)
		for _, r := range held {
			s.dropFromIndex(r.holder)
		}
		return nil
	})
}

// Reserved returns the addresses that a holds in this network, in ascending order.
func (p *Pool) Reserved(ctx context.Context, a Attachment) (addrs []netip.Addr, err error) {
	err = p.ifExists(ctx, flock.Shared, func(s *store) error {
		held, err := s.heldBy(a)
		addrs = addrsOf(held)
		return err
	})
	return addrs, err
}

// Available returns nil if Reserve can succeed: each range set has an address that is
// free or can be reclaimed, and the directory is writable. Like Reserve it creates the
// directory.
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
