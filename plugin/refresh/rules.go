package refresh

import (
	"context"
	"fmt"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Rules writes to the datapath whether the host has policy rules that fastPath always and auto must leave to the stack. Without
// a change it only reads.
func Rules(ctx context.Context, datapath *loader.Datapath) error {
	var found maps.RouteRules
	var err error
	if found.IPv4, found.IPv6, err = rtnl.UnfollowedRules(); err != nil {
		return fmt.Errorf("list policy rules: %w", err)
	}
	known, err := maps.ReadRouteRules(datapath)
	if err != nil || known == found {
		return err
	}
	return maps.With(ctx, datapath, func(store *maps.Store) error { return store.PutRouteRules(found) })
}
