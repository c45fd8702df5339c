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

// Pool hands out the addresses of one network. It keeps nothing in memory; each method
// locks the network's directory, and wraps flock.ErrBusy if that takes until the
// context ends.
type Pool struct {
	cfg *Config
	log *slog.Logger
}

// Open returns the pool of cfg's network. It does no I/O. A nil log discards.
func Open(cfg *Config, log *slog.Logger) *Pool {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	return &Pool{cfg: cfg, log: log}
}

// Reserve gives a one address from each range set, the requested ones where there are
// any, or nothing at all. Errors wrap ErrExhausted, ErrTaken, ErrDuplicate or flock.ErrBusy,
// or are those of reading and writing files.
func (p *Pool) Reserve(ctx context.Context, a Attachment) (*Result, error) {
	if err := checkAttachment(a); err != nil {
		return nil, fmt.Errorf("reserve addresses: %w", err)
	}
	dns, err := readResolvConf(p.cfg.ResolvConf)
	if err != nil {
		return nil, err
	}
	s, err := createStore(ctx, p.cfg.Dir(), p.log)
	if err != nil {
		return nil, err
	}
	defer s.close()

	if err := refuseDuplicate(s, a); err != nil {
		return nil, err
	}
	addresses, err := p.claimAll(ctx, s, a)
	if err != nil {
		return nil, err
	}
	return &Result{Addresses: addresses, Routes: p.cfg.Routes, DNS: dns}, nil
}

// Release frees all that a holds from this network, also outside the configured
// ranges. It succeeds when there is nothing to free, and goes on after errors.
func (p *Pool) Release(ctx context.Context, a Attachment) error {
	s, err := openStore(ctx, p.cfg.Dir(), flock.Exclusive, p.log)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer s.close()

	held, err := s.heldBy(a)
	if err != nil || len(held) == 0 {
		return err
	}
	var errs []error
	for _, r := range held {
		errs = append(errs, s.remove(r.path))
	}
	errs = append(errs, s.sync())
	return errors.Join(errs...)
}

// Reserved returns the addresses that a holds, in ascending order.
func (p *Pool) Reserved(ctx context.Context, a Attachment) ([]netip.Addr, error) {
	s, err := openStore(ctx, p.cfg.Dir(), flock.Shared, p.log)
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

// Available returns nil if Reserve can succeed: each range set has a free address, and
// the directory, which it creates as Reserve would, can be written to.
func (p *Pool) Available(ctx context.Context) error {
	s, err := createStore(ctx, p.cfg.Dir(), p.log)
	if err != nil {
		return err
	}
	defer s.close()

	errs := []error{s.probe()}
	for i := range p.cfg.Ranges {
		errs = append(errs, p.checkFree(ctx, s, i))
	}
	return errors.Join(errs...)
}

func refuseDuplicate(s *store, a Attachment) error {
	held, err := s.heldBy(a)
	if err != nil {
		return err
	}
	if len(held) > 0 {
		return fmt.Errorf("%w: %s has %v in %s", ErrDuplicate, a, addrsOf(held), s.dir)
	}
	return nil
}

// claimAll leaves nothing reserved unless all of it is, and durably so.
func (p *Pool) claimAll(ctx context.Context, s *store, a Attachment) ([]Address, error) {
	addresses, err := p.claimEach(ctx, s, a)
	if err == nil {
		p.rememberLast(s, addresses)
		err = s.sync()
	}
	if err != nil {
		return nil, errors.Join(err, unclaim(s, addresses))
	}
	return addresses, nil
}

// claimEach returns what it claimed, with an error also.
func (p *Pool) claimEach(ctx context.Context, s *store, a Attachment) ([]Address, error) {
	if err := s.stage(a); err != nil {
		return nil, err
	}
	defer s.removeTemporary()

	var claimed []Address
	for i := range p.cfg.Ranges {
		address, err := p.claimFrom(ctx, s, i)
		if err != nil {
			return claimed, err
		}
		claimed = append(claimed, address)
	}
	return claimed, nil
}

func unclaim(s *store, addresses []Address) error {
	var errs []error
	for _, address := range addresses {
		errs = append(errs, s.remove(s.path(address.Prefix.Addr().String())))
	}
	return errors.Join(errs...)
}

// claimFrom claims an address of range set i: the requested one or the next free one.
func (p *Pool) claimFrom(ctx context.Context, s *store, i int) (Address, error) {
	if requested := p.requested(i); requested.IsValid() {
		return p.claimRequested(s, i, requested)
	}
	for addr, r := range p.cfg.Ranges[i].candidates(s.last(i)) {
		if err := ctx.Err(); err != nil {
			return Address{}, fmt.Errorf("search range set %d for a free address: %w", i, err)
		}
		standing, err := s.claim(addr)
		if err != nil {
			return Address{}, err
		}
		if standing == nil {
			return newAddress(addr, r), nil
		}
	}
	return Address{}, p.exhausted(i)
}

func (p *Pool) claimRequested(s *store, i int, addr netip.Addr) (Address, error) {
	standing, err := s.claim(addr)
	if err != nil {
		return Address{}, err
	}
	if standing != nil && standing.err != nil {
		return Address{}, fmt.Errorf("%w: %s, by an unknown holder: %w", ErrTaken, addr, standing.err)
	}
	if standing != nil {
		return Address{}, fmt.Errorf("%w: %s holds %s in %s", ErrTaken, standing.holder, addr, s.dir)
	}
	set := p.cfg.Ranges[i]
	return newAddress(addr, set[slices.IndexFunc(set, func(r Range) bool { return r.contains(addr) })]), nil
}

func (p *Pool) checkFree(ctx context.Context, s *store, i int) error {
	for addr := range p.cfg.Ranges[i].candidates(s.last(i)) {
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("search range set %d for a free address: %w", i, err)
		}
		if s.isFree(addr) {
			return nil
		}
	}
	return p.exhausted(i)
}

// rememberLast does not fail the reservation: it only loses the round robin's place.
func (p *Pool) rememberLast(s *store, addresses []Address) {
	for i, address := range addresses {
		if err := s.setLast(i, address.Prefix.Addr()); err != nil {
			p.log.Warn("lose round robin position", "err", err)
		}
	}
}

func (p *Pool) exhausted(i int) error {
	return fmt.Errorf("%w: range set %d (%s) in %s", ErrExhausted, i, p.cfg.Ranges[i], p.cfg.Dir())
}

func (p *Pool) requested(i int) netip.Addr {
	if i >= len(p.cfg.Requested) {
		return netip.Addr{}
	}
	return p.cfg.Requested[i]
}

func newAddress(addr netip.Addr, r Range) Address {
	return Address{Prefix: netip.PrefixFrom(addr, r.Subnet.Bits()), Gateway: r.Gateway}
}

func addrsOf(records []record) []netip.Addr {
	var addrs []netip.Addr
	for _, r := range records {
		addrs = append(addrs, r.addr)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}
