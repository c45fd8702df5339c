package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	tests := []struct {
		name    string
		section string
		req     Request
		want    string // range sets, as newline-separated text
	}{
		{
			name:    "defaults of a v4 subnet",
			section: `{"ranges": [[{"subnet": "10.1.0.0/16"}]]}`,
			want:    "10.1.0.0/16 10.1.0.1-10.1.255.254 gw 10.1.0.1",
		}, {
			name:    "defaults of a v6 subnet",
			section: `{"ranges": [[{"subnet": "fd00::/64"}]]}`,
			want:    "fd00::/64 fd00::1-fd00::ffff:ffff:ffff:ffff gw fd00::1",
		}, {
			name:    "smallest subnets",
			section: `{"ranges": [[{"subnet": "10.1.0.4/30"}], [{"subnet": "fd00::4/126"}]]}`,
			want:    "10.1.0.4/30 10.1.0.5-10.1.0.6 gw 10.1.0.5\nfd00::4/126 fd00::5-fd00::7 gw fd00::5",
		}, {
			name:    "all keys",
			section: `{"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.20", "gateway": "10.1.0.254"}]]}`,
			want:    "10.1.0.0/24 10.1.0.10-10.1.0.20 gw 10.1.0.254",
		}, {
			name:    "range of one address",
			section: `{"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.10"}]]}`,
			want:    "10.1.0.0/24 10.1.0.10-10.1.0.10 gw 10.1.0.1",
		}, {
			name:    "network and broadcast address are excluded",
			section: `{"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.0", "rangeEnd": "10.1.0.255"}]]}`,
			want:    "10.1.0.0/24 10.1.0.1-10.1.0.254 gw 10.1.0.1",
		}, {
			name:    "gateway outside the subnet",
			section: `{"ranges": [[{"subnet": "10.1.0.0/24", "gateway": "169.254.1.1"}]]}`,
			want:    "10.1.0.0/24 10.1.0.1-10.1.0.254 gw 169.254.1.1",
		}, {
			name:    "empty and null addresses are absent",
			section: `{"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "", "rangeEnd": null, "gateway": ""}]]}`,
			want:    "10.1.0.0/24 10.1.0.1-10.1.0.254 gw 10.1.0.1",
		}, {
			name:    "canonical form",
			section: `{"ranges": [[{"subnet": "2001:DB8:0::/64", "rangeStart": "2001:0db8::00a0"}], [{"subnet": "10.1.0.0/24", "rangeStart": "::ffff:10.1.0.9"}]]}`,
			want:    "2001:db8::/64 2001:db8::a0-2001:db8::ffff:ffff:ffff:ffff gw 2001:db8::1\n10.1.0.0/24 10.1.0.9-10.1.0.254 gw 10.1.0.1",
		}, {
			name:    "keys in any case, unknown keys",
			section: `{"Ranges": [[{"SUBNET": "10.1.0.0/24", "color": 5}]], "exotic": {}}`,
			want:    "10.1.0.0/24 10.1.0.1-10.1.0.254 gw 10.1.0.1",
		}, {
			name:    "two ranges of one subnet",
			section: `{"ranges": [[{"subnet": "10.1.0.0/24", "rangeEnd": "10.1.0.9"}, {"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10"}]]}`,
			want:    "10.1.0.0/24 10.1.0.1-10.1.0.9 gw 10.1.0.1, 10.1.0.0/24 10.1.0.10-10.1.0.254 gw 10.1.0.1",
		}, {
			name:    "legacy range",
			section: `{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.5", "rangeEnd": "10.1.0.6", "gateway": "10.1.0.9"}`,
			want:    "10.1.0.0/24 10.1.0.5-10.1.0.6 gw 10.1.0.9",
		}, {
			name:    "legacy keys without subnet are ignored",
			section: `{"gateway": "10.9.9.9", "ranges": [[{"subnet": "10.1.0.0/24"}]]}`,
			want:    "10.1.0.0/24 10.1.0.1-10.1.0.254 gw 10.1.0.1",
		}, {
			name:    "order: runtime, legacy, configured",
			section: `{"subnet": "10.1.0.0/30", "ranges": [[{"subnet": "10.2.0.0/30"}]]}`,
			req:     Request{Ranges: json.RawMessage(`[[{"subnet": "10.3.0.0/30"}], [{"subnet": "fd00::/126"}]]`)},
			want: "10.3.0.0/30 10.3.0.1-10.3.0.2 gw 10.3.0.1\nfd00::/126 fd00::1-fd00::3 gw fd00::1\n" +
				"10.1.0.0/30 10.1.0.1-10.1.0.2 gw 10.1.0.1\n10.2.0.0/30 10.2.0.1-10.2.0.2 gw 10.2.0.1",
		}, {
			name:    "only the runtime's ranges",
			section: `{"type": "host-local"}`,
			req:     Request{Ranges: json.RawMessage(`[[{"subnet": "10.3.0.0/30"}]]`)},
			want:    "10.3.0.0/30 10.3.0.1-10.3.0.2 gw 10.3.0.1",
		}, {
			name:    "empty ranges of the runtime",
			section: `{"subnet": "10.1.0.0/30"}`,
			req:     Request{Ranges: json.RawMessage(`[]`)},
			want:    "10.1.0.0/30 10.1.0.1-10.1.0.2 gw 10.1.0.1",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg, err := Parse("net", json.RawMessage(tt.section), tt.req)
			if err != nil {
				t.Fatal(err)
			}
			if got := describe(cfg.Ranges); got != tt.want {
				t.Errorf("ranges:\n%s\nwant:\n%s", got, tt.want)
			}
		})
	}
}

// describe includes what Range.String omits.
func describe(sets []RangeSet) string {
	var lines []string
	for _, set := range sets {
		var ranges []string
		for _, r := range set {
			ranges = append(ranges, r.Subnet.String()+" "+r.String()+" gw "+r.Gateway.String())
		}
		lines = append(lines, strings.Join(ranges, ", "))
	}
	return strings.Join(lines, "\n")
}

// TestPrefixes covers ranges with prefixes.
func TestPrefixes(t *testing.T) {
	for _, test := range []struct{ subnet, keys, want string }{
		{"10.1.0.0/16", ``, "[10.1.0.0/16]"},
		{"10.1.0.4/30", ``, "[10.1.0.4/30]"},
		{"fd00::/64", ``, "[fd00::/64]"},
		{"10.1.0.0/24", `, "rangeStart": "10.1.0.128"`, "[10.1.0.128/25]"},
		{"10.1.0.0/24", `, "rangeEnd": "10.1.0.127"`, "[10.1.0.0/25]"},
		{"10.1.0.0/24", `, "rangeStart": "10.1.0.7", "rangeEnd": "10.1.0.7"`, "[10.1.0.7/32]"},
		{"10.1.0.0/24", `, "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.20"`, "[10.1.0.10/31 10.1.0.12/30 10.1.0.16/30 10.1.0.20/32]"},
		{"255.255.255.0/24", `, "rangeStart": "255.255.255.252"`, "[255.255.255.252/30]"},
		{"fd00::/64", `, "rangeStart": "fd00::8000:0:0:0"`, "[fd00::8000:0:0:0/65]"},
		{"ffff:ffff:ffff:ffff::/64", `, "rangeStart": "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe"`, "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127]"},
	} {
		config, err := Parse("pods", json.RawMessage(fmt.Sprintf(`{"ranges": [[{"subnet": %q%s}]]}`, test.subnet, test.keys)), Request{})
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(config.Ranges[0][0].Prefixes()); got != test.want {
			t.Errorf("%s%s: got %s, want %s", test.subnet, test.keys, got, test.want)
		}
	}
}

func TestParseErrors(t *testing.T) {
	const valid = `{"ranges": [[{"subnet": "10.1.0.0/16"}]]}`
	tests := []struct {
		name    string
		network string // "net" if empty
		section string
		req     Request
		want    string // after "invalid configuration: "
	}{
		{name: "no section", section: ``,
			want: `ipam.ranges: missing; expected for example [[{"subnet": "10.1.0.0/16"}]]`},
		{name: "section of another type", section: `[]`,
			want: `ipam []: expected an object`},
		{name: "broken JSON", section: `{"ranges":`,
			want: `ipam {"ranges":: expected an object`},
		{name: "no ranges", section: `{"type": "host-local", "rangeStart": "10.1.0.1"}`,
			want: `ipam.ranges: missing; expected for example [[{"subnet": "10.1.0.0/16"}]]`},
		{name: "ranges of another type", section: `{"ranges": {"subnet": "10.1.0.0/16"}}`,
			want: `ipam.ranges {"subnet": "10.1.0.0/16"}: expected a list of range sets`},
		{name: "range set of another type", section: `{"ranges": [{"subnet": "10.1.0.0/16"}]}`,
			want: `ipam.ranges[0] {"subnet": "10.1.0.0/16"}: expected a list of ranges`},
		{name: "range of another type", section: `{"ranges": [["10.1.0.0/16"]]}`,
			want: `ipam.ranges[0][0] "10.1.0.0/16": expected an object`},
		{name: "empty range set", section: `{"ranges": [[{"subnet": "10.1.0.0/16"}], []]}`,
			want: `ipam.ranges[1] []: expected at least one range`},
		{name: "null range set", section: `{"ranges": [null]}`,
			want: `ipam.ranges[0] null: expected at least one range`},
		{name: "no subnet", section: `{"ranges": [[{"rangeStart": "10.1.0.1"}]]}`,
			want: `ipam.ranges[0][0].subnet: missing; expected a subnet such as 10.1.0.0/16`},
		{name: "subnet of another type", section: `{"ranges": [[{"subnet": 10}]]}`,
			want: `ipam.ranges[0][0].subnet 10: expected a subnet such as 10.1.0.0/16`},
		{name: "subnet without length", section: `{"subnet": "10.1.0.0"}`,
			want: `ipam.subnet "10.1.0.0": expected a subnet such as 10.1.0.0/16`},
		{name: "empty subnet", section: `{"subnet": ""}`,
			want: `ipam.subnet "": expected a subnet such as 10.1.0.0/16`},
		{name: "mapped subnet", section: `{"subnet": "::ffff:10.1.0.0/112"}`,
			want: `ipam.subnet "::ffff:10.1.0.0/112": expected a subnet such as 10.1.0.0/16`},
		{name: "host bits", section: `{"subnet": "10.1.2.3/16"}`,
			want: `ipam.subnet "10.1.2.3/16": has host bits set; expected 10.1.0.0/16`},
		{name: "v4 too small", section: `{"subnet": "10.1.0.0/31"}`,
			want: `ipam.subnet "10.1.0.0/31": too small; expected /30 or larger`},
		{name: "v6 too small", section: `{"subnet": "fd00::/127"}`,
			want: `ipam.subnet "fd00::/127": too small; expected /126 or larger`},
		{name: "start outside", section: `{"ranges": [[{"subnet": "10.3.0.0/16"}, {"subnet": "10.1.0.0/16", "rangeStart": "10.2.0.5"}]]}`,
			want: `ipam.ranges[0][1].rangeStart "10.2.0.5": expected an address in subnet 10.1.0.0/16`},
		{name: "start of another family", section: `{"subnet": "10.1.0.0/16", "rangeStart": "fd00::1"}`,
			want: `ipam.rangeStart "fd00::1": expected an address in subnet 10.1.0.0/16`},
		{name: "start is no address", section: `{"subnet": "10.1.0.0/16", "rangeStart": "10.1.0"}`,
			want: `ipam.rangeStart "10.1.0": expected an IP address`},
		{name: "start with zone", section: `{"subnet": "fe80::/64", "rangeStart": "fe80::1%eth0"}`,
			want: `ipam.rangeStart "fe80::1%eth0": expected an IP address`},
		{name: "start of another type", section: `{"subnet": "10.1.0.0/16", "rangeStart": 5}`,
			want: `ipam.rangeStart 5: expected an IP address`},
		{name: "end outside", section: `{"subnet": "10.1.0.0/16", "rangeEnd": "10.2.0.1"}`,
			want: `ipam.rangeEnd "10.2.0.1": expected an address in subnet 10.1.0.0/16`},
		{name: "start after end", section: `{"ranges": [[{"subnet": "10.1.0.0/16", "rangeStart": "10.1.0.9", "rangeEnd": "10.1.0.8"}]]}`,
			want: `ipam.ranges[0][0]: expected a usable address from rangeStart 10.1.0.9 to rangeEnd 10.1.0.8`},
		{name: "broadcast only", section: `{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.255"}`,
			want: `ipam: expected a usable address from rangeStart 10.1.0.255 to rangeEnd 10.1.0.254`},
		{name: "gateway is no address", section: `{"subnet": "10.1.0.0/24", "gateway": "router"}`,
			want: `ipam.gateway "router": expected an IP address`},
		{name: "gateway of another family", section: `{"subnet": "10.1.0.0/24", "gateway": "fd00::1"}`,
			want: `ipam.gateway "fd00::1": expected the address family of subnet 10.1.0.0/24`},
		{name: "mixed families", section: `{"ranges": [[{"subnet": "10.1.0.0/24"}, {"subnet": "fd00::/64"}]]}`,
			want: `ipam.ranges[0][1].subnet "fd00::/64": expected the same address family as ipam.ranges[0][0]`},
		{name: "overlap in a set", section: `{"ranges": [[{"subnet": "10.1.0.0/16"}, {"subnet": "10.1.2.0/24"}]]}`,
			want: `ipam.ranges[0][1] "10.1.2.1-10.1.2.254": overlaps ipam.ranges[0][0] "10.1.0.1-10.1.255.254"`},
		{name: "overlap between sets", section: `{"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "10.1.0.0/16"}]]}`,
			want: `ipam.ranges[1][0] "10.1.0.1-10.1.255.254": overlaps ipam.ranges[0][0] "10.1.2.1-10.1.2.254"`},
		{name: "overlap in one address", section: `{"subnet": "10.1.0.0/24", "rangeEnd": "10.1.0.9", "ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.9"}]]}`,
			want: `ipam.ranges[0][0] "10.1.0.9-10.1.0.254": overlaps ipam.subnet "10.1.0.1-10.1.0.9"`},
		{name: "overlap with the runtime's", section: valid, req: Request{Ranges: json.RawMessage(`[[{"subnet": "10.1.2.0/24"}]]`)},
			want: `ipam.ranges[0][0] "10.1.0.1-10.1.255.254": overlaps runtimeConfig.ipRanges[0][0] "10.1.2.1-10.1.2.254"`},
		{name: "invalid range of the runtime", section: valid, req: Request{Ranges: json.RawMessage(`[[{"subnet": "x"}]]`)},
			want: `runtimeConfig.ipRanges[0][0].subnet "x": expected a subnet such as 10.1.0.0/16`},

		{name: "dataDir of another type", section: `{"dataDir": 5}`,
			want: `ipam.dataDir 5: expected a string`},
		{name: "relative dataDir", section: `{"subnet": "10.1.0.0/16", "dataDir": "networks"}`,
			want: `ipam.dataDir "networks": expected the absolute path of a directory`},
		{name: "resolvConf of another type", section: `{"resolvConf": ["/etc/resolv.conf"]}`,
			want: `ipam.resolvConf ["/etc/resolv.conf"]: expected a string`},
		{name: "routes of another type", section: `{"routes": "0.0.0.0/0"}`,
			want: `ipam.routes "0.0.0.0/0": expected a list of routes`},
		{name: "route without destination", section: `{"routes": [{"dst": "0.0.0.0/0"}, {"gw": "10.1.0.1"}]}`,
			want: `ipam.routes[1] {"gw": "10.1.0.1"}: expected a "dst" such as 0.0.0.0/0`},
		{name: "null route", section: `{"routes": [null]}`,
			want: `ipam.routes[0] null: expected a "dst" such as 0.0.0.0/0`},
		{name: "bad route", section: `{"routes": [{"dst": "10.0.0.0"}]}`,
			want: `ipam.routes[0] {"dst": "10.0.0.0"}: invalid CIDR address: 10.0.0.0`},

		{name: "requested is no address", section: valid, req: Request{IPs: []string{"10.1.0.300"}},
			want: `requested address "10.1.0.300": expected an IP address, with or without a prefix length`},
		{name: "requested is empty", section: valid, req: Request{IPs: []string{""}},
			want: `requested address "": expected an IP address, with or without a prefix length`},
		{name: "requested outside", section: valid, req: Request{IPs: []string{"10.1.0.5", "10.2.0.5/16"}},
			want: `requested address "10.2.0.5/16": expected an address in one of [10.1.0.1-10.1.255.254]`},
		{name: "requested broadcast", section: valid, req: Request{IPs: []string{"10.1.255.255"}},
			want: `requested address "10.1.255.255": expected an address in one of [10.1.0.1-10.1.255.254]`},
		{name: "requested gateway", section: valid, req: Request{IPs: []string{"10.1.0.1"}},
			want: `requested address "10.1.0.1": expected an address other than a gateway's`},
		{name: "two requested of one set", section: valid, req: Request{IPs: []string{"10.1.0.5", "10.1.0.6"}},
			want: `requested address "10.1.0.6": range set 0 already has requested address 10.1.0.5; expected one per set`},

		{name: "network name with slash", network: "a/b", section: valid,
			want: `name "a/b": expected an alphanumeric character, then alphanumerics, '_', '.' or '-', 255 in all at most`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			network := tt.network
			if network == "" {
				network = "net"
			}
			_, err := Parse(network, json.RawMessage(tt.section), tt.req)
			if !errors.Is(err, ErrConfig) {
				t.Fatalf("got %v, want ErrConfig", err)
			}
			if want := "invalid configuration: " + tt.want; err.Error() != want {
				t.Errorf("got:\n%s\nwant:\n%s", err, want)
			}
		})
	}
}

func TestParseShortensValues(t *testing.T) {
	section := `{"ranges": {"a": "` + strings.Repeat("x", 10_000) + `"}}`
	_, err := Parse("net", json.RawMessage(section), Request{})
	if err == nil || len(err.Error()) > 300 {
		t.Errorf("error is unreadable: %v", err)
	}
}

func TestNetworkNames(t *testing.T) {
	tests := map[string]bool{
		"net": true, "0": true, "a..b": true, "cni-0_X.y": true, strings.Repeat("n", 255): true,
		"": false, ".": false, "..": false, "../etc": false, "a/b": false, "-a": false, "_a": false,
		"a b": false, "a\x00": false, "é": false, strings.Repeat("n", 256): false,
	}
	for name, want := range tests {
		if err := checkNetwork(name); (err == nil) != want {
			t.Errorf("%q: got %v, want valid = %v", name, err, want)
		}
	}
}

func TestParseRequested(t *testing.T) {
	const section = `{"ranges": [[{"subnet": "10.1.0.0/16"}], [{"subnet": "fd00::/64"}], [{"subnet": "10.2.0.0/16"}]]}`
	addr := netip.MustParseAddr
	tests := []struct {
		name string
		ips  []string
		want []netip.Addr
	}{
		{"none", nil, []netip.Addr{{}, {}, {}}},
		{"in any order, with and without length", []string{"fd00::5/128", "10.1.0.5"}, []netip.Addr{addr("10.1.0.5"), addr("fd00::5"), {}}},
		{"said twice", []string{"10.2.0.5/16", "10.2.0.5"}, []netip.Addr{{}, {}, addr("10.2.0.5")}},
		{"mapped", []string{"::ffff:10.1.0.5"}, []netip.Addr{addr("10.1.0.5"), {}, {}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg, err := Parse("net", json.RawMessage(section), Request{IPs: tt.ips})
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(cfg.Requested, tt.want) {
				t.Errorf("got %v, want %v", cfg.Requested, tt.want)
			}
		})
	}
}

func TestParseOtherKeys(t *testing.T) {
	const section = `{
		"subnet": "10.1.0.0/16", "dataDir": "/data", "resolvConf": "/etc/resolv.conf",
		"routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8", "gw": "10.1.0.9", "mtu": 1400, "advmss": 1360, "priority": 7, "table": 100, "scope": 253}]
	}`
	cfg, err := Parse("net", json.RawMessage(section), Request{})
	if err != nil {
		t.Fatal(err)
	}
	if cfg.Dir() != "/data/net" || cfg.ResolvConf != "/etc/resolv.conf" {
		t.Errorf("dir %q, resolvConf %q", cfg.Dir(), cfg.ResolvConf)
	}
	routes, err := json.Marshal(cfg.Routes)
	if err != nil {
		t.Fatal(err)
	}
	const want = `[{"dst":"0.0.0.0/0"},{"dst":"10.0.0.0/8","gw":"10.1.0.9","mtu":1400,"advmss":1360,"priority":7,"table":100,"scope":253}]`
	if string(routes) != want {
		t.Errorf("routes:\n%s\nwant:\n%s", routes, want)
	}

	if dir := (&Config{Network: "net"}).Dir(); dir != "/var/lib/cni/networks/net" {
		t.Errorf("default directory is %s", dir)
	}
}
