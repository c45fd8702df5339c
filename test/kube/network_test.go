package kube

import (
	"fmt"
	"net/netip"
	"strings"
)

// family is an IP version with its addresses: of hosts by their link and number, of pods of all nodes and of one, and of
// services.
type family struct {
	hosts    [2]string
	pods     string
	nodePods string
	services string
}

var allFamilies = map[string]family{
	"IPv4": {[2]string{"192.0.2.%d/24", "198.51.100.%d/24"}, "10.244.0.0/16", "10.244.%d.0/24", "10.96.0.0/16"},
	"IPv6": {[2]string{"2001:db8:1::%x/64", "2001:db8:2::%x/64"}, "fd00:244::/48", "fd00:244:0:%x::/64", "fd00:96::/112"},
}

const (
	routerNumber = 254 // on each link, of which the first has the API server
	apiPort      = 6443
)

// families are those of nodes, pods and services, as the flag has them.
var families []family

// parseFamilies parses a flag such as IPv4,IPv6.
func parseFamilies(text string) (list []family, err error) {
	for name := range strings.SplitSeq(text, ",") {
		f, ok := allFamilies[name]
		if !ok {
			return nil, fmt.Errorf("-families: got %q, want IPv4, IPv6 or both with a comma between", text)
		}
		list = append(list, f)
	}
	return list, nil
}

// host returns the address of a host on a link, with the link's prefix length.
func (f family) host(link, number int) netip.Prefix {
	return netip.MustParsePrefix(fmt.Sprintf(f.hosts[link], number))
}

// service returns the address of the API server's service.
func (f family) service() netip.Addr { return netip.MustParsePrefix(f.services).Addr().Next() }

// apiAddr returns the address of the API server.
func apiAddr() netip.Addr { return families[0].host(0, routerNumber).Addr() }

// apiURL returns where the API server is.
func apiURL() string { return fmt.Sprintf("https://%s", netip.AddrPortFrom(apiAddr(), apiPort)) }

// prefixes returns a prefix of each family, with commas between.
func prefixes(of func(family) string) string {
	var list []string
	for _, f := range families {
		list = append(list, of(f))
	}
	return strings.Join(list, ",")
}

func podPrefixes() string     { return prefixes(func(f family) string { return f.pods }) }
func servicePrefixes() string { return prefixes(func(f family) string { return f.services }) }
