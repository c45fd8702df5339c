package ipam

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
)

func (p *Pool) reserve(ctx context.Context, a Attachment, check func(*store, []record) error) (*Result, error) {
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
	if err := check(s, held); err != nil {
		return nil, err
	}
	r := &reservation{pool: p, store: s, holder: a, held: held}
	addresses, err := r.run(ctx)
	if err != nil {
		return nil, err
	}
	return &Result{Addresses: addresses, Routes: p.cfg.Routes, DNS: dns}, nil
}

// reservation is one Reserve in progress.
type reservation struct {
	pool   *Pool
	store  *store
	holder Attachment
	held   []record // before this call

	reserved []Address
}

// run reserves an address of every range set, or none. It releases the holder's surplus
// addresses last, so that nobody else gets them if it fails.
func (r *reservation) run(ctx context.Context) ([]Address, error) {
	err := r.reserveEach(ctx)
	if err == nil {
		r.saveLast()
		isKept := func(held record) bool { return r.isReserved(held.addr) }
		err = r.store.release(slices.DeleteFunc(slices.Clone(r.held), isKept))
	}
	if err != nil {
		return nil, errors.Join(err, r.store.release(r.records()))
	}
	r.store.updateIndex(func(i *index) error { return i.put(r.holder, r.records()) })
	return r.reserved, nil
}

func (r *reservation) reserveEach(ctx context.Context) error {
	if err := r.store.stage(r.holder); err != nil {
		return err
	}
	defer r.store.removeTemporary()

	for i := range r.pool.cfg.Ranges {
		addr, err := r.reserveFrom(ctx, i)
		if err != nil {
			return err
		}
		r.reserved = append(r.reserved, newAddress(r.pool.cfg.Ranges[i], addr))
	}
	return nil
}

// reserveFrom reserves an address of range set i: the requested one, the one that the
// holder has, the next free one, or, if none is free, one that can be reclaimed; never one that somebody uses.
func (r *reservation) reserveFrom(ctx context.Context, i int) (netip.Addr, error) {
	if requested := r.pool.requested(i); requested.IsValid() {
		if err := r.reserveAddr(requested); err != nil {
			return requested, err
		}
		return requested, r.refuseUsed(requested)
	}
	if addr := r.heldIn(r.pool.cfg.Ranges[i]); addr.IsValid() {
		if unused, err := r.unlessUsed(r.reserveHeld)(addr); unused || err != nil {
			return addr, err
		}
	}
	return r.pool.search(ctx, r.store, i, r.unlessUsed(r.store.reserve), r.unlessUsed(func(addr netip.Addr) (bool, error) {
		existing, err := r.store.reclaim(addr, nil)
		return existing == nil, err
	}))
}

// unlessUsed returns a function that reserves an address and keeps it only if nobody uses it.
func (r *reservation) unlessUsed(reserve func(netip.Addr) (bool, error)) func(netip.Addr) (bool, error) {
	return func(addr netip.Addr) (bool, error) {
		reserved, err := reserve(addr)
		if !reserved || err != nil {
			return false, err
		}
		if err := r.refuseUsed(addr); err != nil {
			r.pool.log.Warn("skip an address", "err", err)
			return false, nil
		}
		return true, nil
	}
}

func (r *reservation) reserveHeld(addr netip.Addr) (bool, error) { return true, r.reserveAddr(addr) }

// refuseUsed releases an address that somebody without a reservation has, and returns an error.
func (r *reservation) refuseUsed(addr netip.Addr) error {
	if r.pool.options.InUse == nil {
		return nil
	}
	err := r.pool.options.InUse(addr)
	if err != nil {
		err = errors.Join(err, r.store.remove(record{path: r.store.path(addr.String()), addr: addr}))
	}
	return err
}

func (r *reservation) reserveAddr(addr netip.Addr) error {
	existing, err := r.store.reclaim(addr, r.held)
	if err != nil {
		return err
	}
	if existing != nil && existing.err != nil {
		return fmt.Errorf("%w: %s, unknown holder: %w", ErrTaken, addr, existing.err)
	}
	if existing != nil {
		return fmt.Errorf("%w: %s holds %s in %s", ErrTaken, existing.holder, addr, r.store.dir)
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

func (r *reservation) isReserved(addr netip.Addr) bool {
	return slices.ContainsFunc(r.reserved, func(a Address) bool { return a.Prefix.Addr() == addr })
}

func (r *reservation) records() []record {
	var records []record
	for _, address := range r.reserved {
		addr := address.Prefix.Addr()
		records = append(records, record{path: r.store.path(addr.String()), addr: addr, holder: r.holder})
	}
	return records
}

// saveLast saves the position of the round robin. An address that the holder kept does not
// move it. A failure loses only the position, not the reservation.
func (r *reservation) saveLast() {
	held := addrsOf(r.held)
	for i, address := range r.reserved {
		addr := address.Prefix.Addr()
		if slices.Contains(held, addr) {
			continue
		}
		if err := r.store.setLast(i, addr); err != nil {
			r.pool.log.Warn("cannot save the round robin position", "err", err)
		}
	}
}

// search returns the first address of range set i in round robin order for which free is
// true, or else the first for which reclaimable is true.
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
	return netip.Addr{}, fmt.Errorf("%w: range set %d (%s) in %s", ErrExhausted, i, p.cfg.Ranges[i], p.cfg.Dir())
}

// searchFree returns the first address for which free is true, or the zero Addr.
func (p *Pool) searchFree(ctx context.Context, s *store, i int, free func(netip.Addr) (bool, error)) (netip.Addr, error) {
	const long = 64

	set := p.cfg.Ranges[i]
	var passed takenRun
	tried := 0
	begin := func(first netip.Addr) netip.Addr {
		passed.first, tried = first, 0
		return s.endOfTakenRun(first)
	}
	for passed.end = range set.candidates(s.last(i), begin) {
		found, err := p.try(ctx, i, passed.end, free)
		if err != nil {
			return netip.Addr{}, err
		}
		if found && tried >= long && set.startsAt(passed.first) {
			s.addTakenRun(passed)
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

func (p *Pool) requested(i int) netip.Addr {
	if i >= len(p.cfg.Requested) {
		return netip.Addr{}
	}
	return p.cfg.Requested[i]
}

// newAddress returns the Address of an IP address that the set contains.
func newAddress(set RangeSet, addr netip.Addr) Address {
	r := set[slices.IndexFunc(set, func(r Range) bool { return r.contains(addr) })]
	return Address{Prefix: netip.PrefixFrom(addr, r.Subnet.Bits()), Gateway: r.Gateway}
}
