// Package reconcile brings this host into the state that package desired computes: it lists the present state, compares,
// and changes what differs. It lists the present state each time, because others change it, too.
package reconcile

import (
	"fmt"
	"math"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Present is the state of this host.
type Present struct {
	Device *Device     // the tunnel, or another device that has its name; nil: none
	Tunnel maps.Tunnel // zero: none
	Routes []rtnl.NodeRoute
	Nodes  []maps.Node
}

// Device is a tunnel device.
type Device struct {
	Index     int
	Name      string
	Kind      string
	Ours      bool // it has our alias
	External  bool // VXLAN that takes the outer addresses from routes and programs
	Up, NoARP bool
	Port      int
	MAC       string
	MTU       int
	Addresses []netip.Prefix
}

// Changes lead from the present to the desired state.
type Changes struct {
	DeleteDevice, CreateDevice bool
	SetDevice                  bool // alias, MAC, MTU, flags
	AddAddresses               []netip.Prefix
	DeleteAddresses            []netip.Prefix
	SetTunnel, SetNodes        bool             // in the datapath
	Add, Replace, Delete       []rtnl.NodeRoute // in a route to be added, device 0 is the tunnel
}

// IsEmpty reports whether nothing changes.
func (c *Changes) IsEmpty() bool { return c.Count() == 0 }

// Count returns the number of changes.
func (c *Changes) Count() int {
	n := len(c.AddAddresses) + len(c.DeleteAddresses) + len(c.Add) + len(c.Replace) + len(c.Delete)
	for _, change := range []bool{c.DeleteDevice, c.CreateDevice, c.SetDevice, c.SetTunnel, c.SetNodes} {
		if change {
			n++
		}
	}
	return n
}

// Difference returns the changes to the desired state. It fails if a device of somebody else has the tunnel's name.
func Difference(want *desired.State, have *Present) (*Changes, error) {
	c := &Changes{}
	if err := c.compareDevice(want.Device, have.Device); err != nil {
		return nil, err
	}
	tunnel := 0
	if have.Device != nil && !c.DeleteDevice {
		tunnel = have.Device.Index
	}
	present := have.Routes
	if c.DeleteDevice { // its routes go with it
		present = slices.DeleteFunc(slices.Clone(present), func(r rtnl.NodeRoute) bool { return r.Device == have.Device.Index })
	}
	c.SetTunnel = c.CreateDevice || tunnelOf(want.Device, tunnel) != have.Tunnel
	c.compareRoutes(slices.Concat(want.Routes, refusing(want.Unassigned)), present, tunnel)
	c.SetNodes = !slices.Equal(sorted(want.Nodes), sorted(have.Nodes))
	return c, nil
}

// tunnelOf returns the tunnel that the datapath is to have.
func tunnelOf(want *desired.Device, index int) (tunnel maps.Tunnel) {
	if want != nil {
		tunnel = want.Tunnel
		tunnel.IfIndex = index
	}
	return tunnel
}

func (c *Changes) compareDevice(want *desired.Device, have *Device) error {
	if have != nil && !have.Ours && (want == nil || !have.isBegunAs(want)) {
		if want != nil && have.Name == want.Name {
			return fmt.Errorf("device %s (%s) is not ebpfnet's: delete it, or choose another name with --device", have.Name, have.Kind)
		}
		have = nil
	}
	c.DeleteDevice = have != nil && (want == nil || !have.canBecome(want))
	c.CreateDevice = want != nil && (have == nil || c.DeleteDevice)
	if want == nil {
		return nil
	}
	if c.CreateDevice {
		c.AddAddresses = want.Addresses
		return nil
	}
	c.SetDevice = !have.Ours || have.MAC != want.MAC || have.MTU != want.MTU || !have.Up || !have.NoARP
	c.AddAddresses = without(want.Addresses, have.Addresses)
	c.DeleteAddresses = without(have.Addresses, want.Addresses)
	return nil
}

// canBecome reports whether a device differs only in attributes that can be changed.
func (d *Device) canBecome(want *desired.Device) bool {
	return d.Name == want.Name && d.External && d.Port == int(want.Tunnel.Port)
}

// isBegunAs reports whether a device without our alias is ours: an agent that was killed before it set the alias added it.
func (d *Device) isBegunAs(want *desired.Device) bool {
	return d.Name == want.Name && d.External && d.MAC == want.MAC
}

func without(all, some []netip.Prefix) (rest []netip.Prefix) {
	for _, prefix := range all {
		if !slices.Contains(some, prefix) {
			rest = append(rest, prefix)
		}
	}
	return rest
}

// routeKey identifies a route in the kernel's table.
type routeKey struct {
	prefix netip.Prefix
	metric uint32
}

func keyOf(r rtnl.NodeRoute) routeKey { return routeKey{r.Prefix, r.Metric} }

// refusing returns unreachable routes. Any other route to the same prefix takes precedence.
func refusing(prefixes []netip.Prefix) (routes []rtnl.NodeRoute) {
	for _, prefix := range prefixes {
		routes = append(routes, rtnl.NodeRoute{Prefix: prefix, Metric: math.MaxUint32, Unreachable: true})
	}
	return routes
}

// compareRoutes replaces device 0 in desired routes by the index of the tunnel device.
func (c *Changes) compareRoutes(want, have []rtnl.NodeRoute, tunnel int) {
	missing := make(map[routeKey]rtnl.NodeRoute, len(want))
	for _, route := range want {
		if route.Device == 0 && !route.Unreachable {
			route.Device = tunnel
		}
		missing[keyOf(route)] = route
	}
	for _, route := range have {
		target, found := missing[keyOf(route)]
		switch {
		case !found:
			c.Delete = append(c.Delete, route)
			continue
		case target != route:
			c.Replace = append(c.Replace, target)
		}
		delete(missing, keyOf(route))
	}
	for _, route := range want { // in order
		if route, ok := missing[keyOf(route)]; ok {
			c.Add = append(c.Add, route)
		}
	}
}

func sorted(nodes []maps.Node) []maps.Node {
	return slices.SortedFunc(slices.Values(nodes), func(a, b maps.Node) int { return a.Prefix.Compare(b.Prefix) })
}
