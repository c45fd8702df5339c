package plugin

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
)

const overlapRemedy = "give each network its own subnet, or addresses of one subnet may be assigned twice"

// inUse returns an error if somebody without a reservation has an address. It asks only where another device of the host
// has the address's subnet, and warns of that once.
func (a *adder) inUse(addr netip.Addr) error {
	overlap, err := refresh.OverlapAt(a.host, addr)
	shared := false
	if err == nil && overlap != nil {
		shared, err = sharesReservations(*overlap)
	}
	if err != nil {
		a.log.Warn("cannot look for overlapping subnets", "err", err)
	}
	if err != nil || overlap == nil || shared {
		return nil
	}
	if !slices.Contains(a.overlaps, overlap.String()) {
		a.overlaps = append(a.overlaps, overlap.String())
		a.log.Warn("this network's subnet overlaps "+overlap.String(), "remedy", overlapRemedy)
	}
	switch answers, err := overlap.Answers(a.host, addr); {
	case err != nil:
		a.log.Warn("cannot find out whether an address is in use", "address", addr, "device", overlap.Device, "err", err)
		return nil
	case answers:
		return fmt.Errorf("%w: %s answers on device %s, whose subnet %s overlaps this network's", ipam.ErrTaken, addr, overlap.Device, overlap.Subnet)
	}
	return nil
}

// sharesReservations reports whether what has an overlapping subnet is a bridge whose containers are ours.
func sharesReservations(overlap refresh.Overlap) (shares bool, err error) {
	err = loader.IfLoaded(loader.OpenLoaded, func(datapath *loader.Datapath) (err error) {
		shares, err = overlap.SharesReservations(datapath)
		return err
	})
	return shares, err
}

// warnOfOverlaps logs what else on the host has the network's subnets. Nothing fails because of it.
func (v *verb) warnOfOverlaps() {
	if err := v.lookForOverlaps(); err != nil {
		v.log.Warn("cannot look for overlapping subnets", "err", err)
	}
}

func (v *verb) lookForOverlaps() error {
	host, err := rtnl.Open()
	if err != nil {
		return err
	}
	defer host.Close()
	overlaps, err := refresh.Overlaps(host, v.config.IPAM.Subnets())
	for _, overlap := range overlaps {
		shared, errShared := sharesReservations(overlap)
		if err = errors.Join(err, errShared); !shared {
			v.log.Warn("this network's subnet overlaps "+overlap.String(), "remedy", overlapRemedy)
		}
	}
	return err
}
