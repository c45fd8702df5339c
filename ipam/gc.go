package ipam

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	"github.com/ebpfnet/ebpfnet/loader/flock"
)

// Retain releases the addresses of attachments that are not valid, and removes torn
// records (CNI specification, section 2, GC). It continues after errors and joins them.
//
// It calls valid once per attachment with the lock held, so that no ADD can intervene
// between the call and the release; valid must be quick and must not use the pool. For
// records of old host-local versions its argument has no IfName: then any valid interface
// of that container makes it valid.
func (p *Pool) Retain(ctx context.Context, valid func(Attachment) bool) error {
	return p.ifExists(ctx, flock.Exclusive, func(s *store) error {
		records, err := s.records()
		if err != nil {
			return err
		}
		return s.retain(records, oncePerAttachment(valid))
	})
}

func (s *store) retain(records []record, valid func(Attachment) bool) error {
	released := map[Attachment]bool{}
	var errs []error
	for _, r := range records {
		switch {
		case r.isTorn():
			errs = append(errs, s.removeTorn(r))
		case r.err != nil:
			errs = append(errs, r.err)
		case !valid(r.holder):
			if err := s.remove(r); err != nil {
				errs = append(errs, err)
				continue
			}
			released[r.holder] = true
		}
	}
	err := errors.Join(errs...)
	if err != nil {
		s.abandonIndex(err)
	}
	for a := range released {
		s.dropFromIndex(a)
	}
	return err
}

// Orphans returns the attachments whose addresses Retain would release, sorted, and releases none.
func (p *Pool) Orphans(ctx context.Context, valid func(Attachment) bool) ([]Attachment, error) {
	valid = oncePerAttachment(valid)
	orphans := map[Attachment]bool{}
	err := p.ifExists(ctx, flock.Shared, func(s *store) error {
		records, err := s.records()
		for _, r := range records {
			if r.err == nil && !valid(r.holder) {
				orphans[r.holder] = true
			}
		}
		return err
	})
	return sorted(orphans), err
}

// oncePerAttachment caches the results of valid: an attachment can hold many addresses.
func oncePerAttachment(valid func(Attachment) bool) func(Attachment) bool {
	cache := map[Attachment]bool{}
	return func(a Attachment) bool {
		if _, ok := cache[a]; !ok {
			cache[a] = valid(a)
		}
		return cache[a]
	}
}

func sorted(set map[Attachment]bool) []Attachment {
	return slices.SortedFunc(maps.Keys(set), func(a, b Attachment) int {
		return cmp.Or(cmp.Compare(a.ContainerID, b.ContainerID), cmp.Compare(a.IfName, b.IfName))
	})
}
