package rtnl

import (
	"errors"
	"net/netip"
)

// OwnRoutes lists the routes of the node agent and of the plugin in the calling thread's network namespace.
func OwnRoutes() (list []NodeRoute, err error) {
	for _, protocol := range []uint8{NodeProtocol, PluginProtocol} {
		err := withRoutes(protocol, func(routes *NodeRoutes) error {
			some, err := routes.List()
			list = append(list, some...)
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	return list, nil
}

// RoutedByNodes returns the prefixes of the node agent's routes to other nodes in the calling thread's network namespace.
func RoutedByNodes() (routed map[netip.Prefix]bool, err error) {
	routed = map[netip.Prefix]bool{}
	return routed, withRoutes(NodeProtocol, func(routes *NodeRoutes) error {
		list, err := routes.List()
		for _, route := range list {
			if !route.Unreachable {
				routed[route.Prefix] = true
			}
		}
		return err
	})
}

// DeletePluginRoutes deletes routes of the plugin in the calling thread's network namespace.
func DeletePluginRoutes(which func(NodeRoute) bool) error {
	return withRoutes(PluginProtocol, func(routes *NodeRoutes) error {
		list, err := routes.List()
		for _, route := range list {
			if which(route) {
				err = errors.Join(err, routes.Delete(route))
			}
		}
		return err
	})
}

func withRoutes(protocol uint8, use func(*NodeRoutes) error) error {
	routes, err := OpenNodeRoutes(protocol)
	if err != nil {
		return err
	}
	defer routes.Close()
	return use(routes)
}
