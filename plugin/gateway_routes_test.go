package plugin

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/plugin/link"
)

func TestGatewayRoutes(t *testing.T) {
	addresses := []link.Address{
		{Prefix: netip.MustParsePrefix("10.88.0.5/16"), Gateway: netip.MustParseAddr("10.88.0.1")},
		{Prefix: netip.MustParsePrefix("fd00:88::5/64"), Gateway: netip.MustParseAddr("fd00:88::1")},
	}
	isHost := func(addr netip.Addr) bool { return addr == netip.MustParseAddr("192.0.2.1") }
	for _, test := range []struct{ name, routes, want string }{
		{"none", `[{"dst": "0.0.0.0/0"}, {"dst": "198.18.0.0/15", "gw": "10.88.0.1"}, {"dst": "::/0", "gw": "fe80::1"}]`, ""},
		{"the host", `[{"dst": "203.0.113.0/24", "gw": "192.0.2.1"}]`, ""},
		{"one", `[{"dst": "0.0.0.0/0"}, {"dst": "203.0.113.0/24", "gw": "10.88.0.99"}]`, "203.0.113.0/24 via 10.88.0.99"},
		{"everything", `[{"dst": "0.0.0.0/0", "gw": "10.88.0.99"}, {"dst": "198.18.0.0/15"}, {"dst": "::/0"}]`,
			"0.0.0.0/0 via 10.88.0.99, 10.88.0.0/16, 10.88.0.1/32, 198.18.0.0/15"},
		{"the host within", `[{"dst": "::/0", "gw": "fd00:88::99"}, {"dst": "fd00:99::/64", "gw": "fd00:88::1"}]`,
			"::/0 via fd00:88::99, fd00:88::/64, fd00:88::1/128, fd00:99::/64"},
		{"the lower priority", `[{"dst": "203.0.113.0/24", "gw": "10.88.0.98", "priority": 7}, {"dst": "203.0.113.0/24", "gw": "10.88.0.99", "priority": 6}]`,
			"203.0.113.0/24 via 10.88.0.99"},
		{"the first", `[{"dst": "203.0.113.0/24", "gw": "10.88.0.98"}, {"dst": "203.0.113.0/24", "gw": "10.88.0.99"}]`, "203.0.113.0/24 via 10.88.0.98"},
		{"the host preferred", `[{"dst": "203.0.113.0/24", "gw": "10.88.0.98", "priority": 7}, {"dst": "203.0.113.0/24"}]`, ""},
		{"IPv6 has a default priority", `[{"dst": "3fff::/32", "gw": "fd00:88::98"}, {"dst": "3fff::/32", "gw": "fd00:88::99", "priority": 1023}]`,
			"3fff::/32 via fd00:88::99"},
		{"our own subnet", `[{"dst": "10.88.0.0/16", "gw": "10.88.0.99"}]`, ""},
		{"other tables", `[{"dst": "203.0.113.0/24", "gw": "10.88.0.99"}, {"dst": "203.0.113.0/25", "table": 100}, {"dst": "203.0.113.128/25", "table": 254}]`,
			"203.0.113.0/24 via 10.88.0.99, 203.0.113.128/25"},
		{"host bits", `[{"dst": "203.0.113.7/24", "gw": "::ffff:10.88.0.99"}]`, "203.0.113.0/24 via 10.88.0.99"},
	} {
		t.Run(test.name, func(t *testing.T) {
			var routes []*cnitypes.Route
			if err := json.Unmarshal([]byte(test.routes), &routes); err != nil {
				t.Fatal(err)
			}
			got := ""
			for _, route := range gatewayRoutes(addresses, routes, isHost) {
				if got != "" {
					got += ", "
				}
				got += route.To.String()
				if route.Gateway.IsValid() {
					got += fmt.Sprintf(" via %s", route.Gateway)
				}
			}
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
