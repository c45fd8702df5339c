package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

func (p *Pool) reserve(ctx context.Context, a Attachment, agree func(*store, []record) error) (*Result, error) {
	if err := checkAttachment(a); err != nil {
		return nil, fmt.Errorf("reserve addresses: %w", err)
	}
	dns, err := readResolvConf(p.cfg.ResolvConf)
	if err != nil {
		return nil, err
	}
	s, err := p.create(ctx)
	if err != nil {
		return nil, err
	}
	defer s.close()

	held, err := s.heldBy(a)
	if err != nil {
		return nil, err
	}
	if err := agree(s, held); err != nil {
		return nil, err
	}
	r := &reservation{pool: p, store: s, holder: a, held: held}
	addresses, err := r.run(ctx)
	if err != nil {
		return nil, err
	}
	return &Result{Addresses: addresses, Routes: p.cfg.Routes, DNS: dns}, nil
}

// reservation is one Reserve under way.
type reservation struct {
	pool   *Pool
	store  *store
	holder Attachment
	held   []record // from before

	claimed []Address
}

// run leaves nothing claimed unless all of it is. What the holder had
// before goes last, since it stays taken that long.
func (r *reservation) run(ctx context.Context) ([]Address, error) {
	err := r.claimEach(ctx)
	if err == nil {
		r.rememberLast()
		err = r.store.release(r.surplus())
	}
	if err != nil {
		return nil, errors.Join(err, r.unclaim())
	}
	r.store.note(r.holder, r.records())
	return r.claimed, nil
}

func (r *reservation) claimEach(ctx context.Context) error {
	if err := r.store.stage(r.holder); err != nil {
		return err
	}
	defer r.store.removeTemporary()

	for i := range r.pool.cfg.Ranges {
		addr, err := r.claimFrom(ctx, i)
		if err != nil {
			return err
		}
		r.claimed = append(r.claimed, newAddress(r.pool.cfg.Ranges[i], addr))
	}
	return nil
}

// claimFrom claims an address of range set i: the requested one, that from before, or the
// next free one. Only where none is free, that of a container that is gone.
func (r *reservation) claimFrom(ctx context.Context, i int) (netip.Addr, error) {
	if requested := r.pool.requested(i); requested.IsValid() {
		return requested, r.claimRequested(requested)
	}
	if addr := r.heldIn(r.pool.cfg.Ranges[i]); addr.IsValid() {
		return addr, r.claimRequested(addr)
	}
	return r.pool.search(ctx, r.store, i, r.store.claim, func(addr netip.Addr) (bool, error) {
		standing, err := r.store.take(addr, nil)
		return standing == nil, err
	})
}

func (r *reservation) claimRequested(addr netip.Addr) error {
	standing, err := r.store.take(addr, r.held)
	if err != nil {
		return err
	}
	if standing != nil && standing.err != nil {
		return fmt.Errorf("%w: %s, by an unknown holder: %w", ErrTaken, addr, standing.err)
	}
	if standing != nil {
		return fmt.Errorf("%w: %s holds %s in %s", ErrTaken, standing.holder, addr, r.store.dir)
	}
	return nil
}

// heldIn returns the address that the holder has in a set, or the zero Addr.
func (r *reservation) heldIn(set RangeSet) netip.Addr {
	for _, addr := range addrsOf(r.held) {
		if set.contains(addr) && !set.isGateway(addr) {
			return addr
		}
	}
	return netip.Addr{}
}

func (r *reservation) isClaimed(addr netip.Addr) bool {
	return slices.ContainsFunc(r.claimed, func(a Address) bool { return a.Prefix.Addr() == addr })
}

// surplus is what the holder had and does not keep.
func (r *reservation) surplus() []record {
	return slices.DeleteFunc(slices.Clone(r.held), func(held record) bool { return r.isClaimed(held.addr) })
}

func (r *reservation) records() []record {
	var records []record
	for _, address := range r.claimed {
		addr := address.Prefix.Addr()
		records = append(records, record{path: r.store.path(addr.String()), addr: addr, holder: r.holder})
	}
	return records
}

func (r *reservation) unclaim() error {
	return r.store.release(r.records())
}

// rememberLast does not fail the reservation: it only loses the round robin's place. That
// stays where it is for an address that was held before.
func (r *reservation) rememberLast() {
	held := addrsOf(r.held)
	for i, address := range r.claimed {
		addr := address.Prefix.Addr()
		if slices.Contains(held, addr) {
			continue
		}
		if err := r.store.setLast(i, addr); err != nil {
			r.pool.log.Warn("lose round robin position", "err", err)
		}
	}
}

// search returns the first address of range set i, on from the last one that it gave, for
// which free is true, or else the first for which reclaimable is.
func (p *Pool) search(ctx context.Context, s *store, i int, free, reclaimable func(netip.Addr) (bool, error)) (netip.Addr, error) {
	addr, err := p.searchFree(ctx, s, i, free)
	if err != nil || addr.IsValid() {
		return addr, err
	}
	for addr := range p.cfg.Ranges[i].candidates(s.last(i), nil) {
		if found, err := p.try(ctx, i, addr, reclaimable); found || err != nil {
			return addr, err
		}
	}
	return netip.Addr{}, p.exhausted(i)
}

// searchFree returns the zero Addr where there is none.
func (p *Pool) searchFree(ctx context.Context, s *store, i int, free func(netip.Addr) (bool, error)) (netip.Addr, error) {
	const long = 64

	set := p.cfg.Ranges[i]
	var passed row
	tried := 0
	begin := func(first netip.Addr) netip.Addr {
		passed.first, tried = first, 0
		return s.endOfRow(first)
	}
	for passed.end = range set.candidates(s.last(i), begin) {
		found, err := p.try(ctx, i, passed.end, free)
		if err != nil {
			return netip.Addr{}, err
		}
		if found && tried >= long && set.startsAt(passed.first) {
			s.noteRow(passed)
		}
		if found {
			return passed.end, nil
		}
		tried++
	}
	return netip.Addr{}, nil
}

func (p *Pool) try(ctx context.Context, i int, addr netip.Addr, fits func(netip.Addr) (bool, error)) (bool, error) {
	if err := ctx.Err(); err != nil {
		return false, fmt.Errorf("search range set %d for a free address: %w", i, err)
	}
	return fits(addr)
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

// newAddress is for an address that the set contains.
func newAddress(set RangeSet, addr netip.Addr) Address {
	r := set[slices.IndexFunc(set, func(r Range) bool { return r.contains(addr) })]
	return Address{Prefix: netip.PrefixFrom(addr, r.Subnet.Bits()), Gateway: r.Gateway}
}
