package maps

import (
	"fmt"
	"net/netip"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// Route is a route of a container in the datapath.
type Route struct {
	To      netip.Prefix
	Gateway netip.Addr // invalid: the host
}

// String returns the route as a routing table shows it.
func (r Route) String() string { return fmt.Sprintf("%s via %s", r.To, r.Gateway) }

// RouteSetOf returns the identifier of a set; 0 for an empty one.
func RouteSetOf(routes []Route) PrefixSet {
	var texts []string
	for _, route := range routes {
		texts = append(texts, route.String())
	}
	return prefixSetOf(texts)
}

// AddRoutes creates the missing entries of a set of routes.
func (s *Store) AddRoutes(routes []Route) error {
	set := RouteSetOf(routes)
	for _, route := range routes {
		if err := s.putPrefix(prefixKey(set, route.To), wireOrZero(route.Gateway)); err != nil {
			return fmt.Errorf("put the route %s into %v: %w", route, s.dp.Prefixes, err)
		}
	}
	return nil
}

// GatewayRoutes lists the routes of all sets that have a gateway.
func GatewayRoutes(dp *loader.Datapath) (map[PrefixSet][]Route, error) {
	sets := map[PrefixSet][]Route{}
	for entry, err := range entries[bpf.PrefixKey, bpf.Addr](dp.Prefixes) {
		if err != nil {
			return nil, err
		}
		if gateway := addrOrNone(entry.value); gateway.IsValid() {
			set := PrefixSet(entry.key.Set)
			sets[set] = append(sets[set], Route{To: prefixOf(entry.key), Gateway: gateway})
		}
	}
	return sets, nil
}
