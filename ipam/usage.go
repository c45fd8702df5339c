package ipam

import (
	"errors"
	"io/fs"
	"math/big"
	"net/netip"
	"slices"
)

// Usage is how much of a range set is taken.
type Usage struct {
	Ranges    RangeSet
	Addresses float64 // that attachments can have
	Reserved  int     // of them, also by attachments of an earlier boot
}

// Usage counts the reservations of each range set. It reads the names of the files without a lock, so it may miss
// one that is made meanwhile.
func (c *Config) Usage() ([]Usage, error) {
	reserved, err := c.reservedAddrs()
	if err != nil {
		return nil, err
	}
	var all []Usage
	for _, set := range c.Ranges {
		u := Usage{Ranges: set, Addresses: set.size()}
		for _, addr := range reserved {
			if set.contains(addr) {
				u.Reserved++
			}
		}
		all = append(all, u)
	}
	return all, nil
}

func (c *Config) reservedAddrs() (addrs []netip.Addr, err error) {
	names, err := readNames(c.Dir())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil // before the first ADD
	}
	for _, name := range names {
		if addr, err := netip.ParseAddr(name); err == nil {
			addrs = append(addrs, addr)
		}
	}
	return addrs, err
}

// size counts the addresses of a set, without gateways.
func (s RangeSet) size() float64 {
	n := new(big.Int)
	var gateways []netip.Addr
	for _, r := range s {
		first, last := new(big.Int).SetBytes(r.Start.AsSlice()), new(big.Int).SetBytes(r.End.AsSlice())
		n.Add(n, last.Sub(last, first)).Add(n, big.NewInt(1))
		if s.contains(r.Gateway) && !slices.Contains(gateways, r.Gateway) {
			gateways = append(gateways, r.Gateway)
		}
	}
	n.Sub(n, big.NewInt(int64(len(gateways))))
	size, _ := new(big.Float).SetInt(n).Float64()
	return size
}
