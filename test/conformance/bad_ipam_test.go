package conformance

import "testing"

// TestBadIPAM calls ADD with an invalid value of each of host-local's keys. Package ipam has the rows of ranges.
func TestBadIPAM(t *testing.T) {
	wantRefused(t, []badValue{
		{"ipam", "host-local", codeInvalidConfig, []string{"ipam", `"host-local"`, "object"}},
		{"ipam", list{}, codeInvalidConfig, []string{"ipam", "[]", "object"}},
		{"ipam.type", "dhcp", codeInternal, []string{"ipam.type", "dhcp", "find"}}, // not installed
		{"ipam.type", "nowhere", codeInternal, []string{"ipam.type", "nowhere", "find"}},
		{"ipam.type", 4, codeInvalidConfig, []string{"ipam", "type", "4"}},
		{"ipam.routes", list{object{"dst": "0.0.0.0/0", "gw": "host"}}, codeInvalidConfig, []string{"ipam.routes[0]", "host"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "10.99.0.1"), codeInvalidConfig, []string{"ipam.routes[0]", "203.0.113.0/24", "10.99.0.1", "this network"}},
		{"ipam.routes", gatewayRoute("2001:db8:9::/48", "fd00:99::1"), codeInvalidConfig, []string{"ipam.routes[0]", "2001:db8:9::/48", "fd00:99::1", "uplink"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "10.88.0.0"), codeInvalidConfig, []string{"ipam.routes[0]", "10.88.0.0", "this network"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "10.88.255.255"), codeInvalidConfig, []string{"ipam.routes[0]", "10.88.255.255", "this network"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "192.0.2.255"), codeInvalidConfig, []string{"ipam.routes[0]", "192.0.2.255", "neighbor"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "127.0.0.1"), codeInvalidConfig, []string{"ipam.routes[0]", "127.0.0.1", "container or host"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "224.0.0.1"), codeInvalidConfig, []string{"ipam.routes[0]", "224.0.0.1", "container or host"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "fd00:88::99"), codeInvalidConfig, []string{"ipam.routes[0]", "fd00:88::99", "family"}},
		{"ipam.routes", gatewayRoute("203.0.113.0/24", "fd00:88::1"), codeInvalidConfig, []string{"ipam.routes[0]", "fd00:88::1", "family"}},
		{"ipam.routes", gatewayRoute("2001:db8:9::/48", "fe80::99"), codeInvalidConfig, []string{"ipam.routes[0]", "fe80::99", "link-local"}},
		{"ipam.routes", list{object{"dst": "0.0.0.0/0"}, object{"dst": "203.0.113.0/24", "gw": "10.88.0.99", "table": 100}}, codeInvalidConfig, []string{"ipam.routes[1]", "10.88.0.99", "table"}},
		{"ipam.routes", list{object{"dst": "203.0.113.0/24", "gw": "10.88.0.99", "scope": 253}}, codeInvalidConfig, []string{"ipam.routes[0]", "10.88.0.99", "scope"}},
	})
}

// gatewayRoute is a list of one route.
func gatewayRoute(dst, gateway string) list { return list{object{"dst": dst, "gw": gateway}} }
