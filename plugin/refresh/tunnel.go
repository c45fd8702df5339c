package refresh

import (
	"context"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Tunnel makes a device the cluster's tunnel: an uplink whose packets must come from nodes. The device must be down,
// because its packets are not checked before. A previous tunnel device becomes an ordinary device. Without a change it
// only reads.
func Tunnel(ctx context.Context, datapath *loader.Datapath, tunnel maps.Tunnel) error {
	before, err := maps.GetTunnel(datapath)
	if err != nil {
		return err
	}
	attached, err := datapath.UplinkAttached(tunnel.IfIndex)
	if err != nil || attached && before == tunnel {
		return err
	}
	return maps.With(ctx, datapath, func(store *maps.Store) error {
		if err := store.SetTunnel(tunnel); err != nil {
			return err
		}
		if before.IfIndex != 0 && before.IfIndex != tunnel.IfIndex {
			if err := removeUplinks(datapath, store, []int{before.IfIndex}); err != nil {
				return err
			}
		}
		if err := store.SetUplink(maps.Uplink{IfIndex: tunnel.IfIndex}); err != nil {
			return err
		}
		return datapath.AttachUplink(tunnel.IfIndex, loader.Ethernet)
	})
}
