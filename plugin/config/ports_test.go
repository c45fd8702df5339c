package config

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/maps"
)

func TestParsePorts(t *testing.T) {
	for _, test := range []struct {
		name  string
		asked []portMapping
		want  string
	}{
		{"none", nil, "[]"},
		{"bounds", []portMapping{{HostPort: 1, ContainerPort: 65535}, {HostPort: 65535, ContainerPort: 1}}, "[any:1->65535/tcp any:65535->1/tcp]"},
		{"protocols", []portMapping{{80, 80, "", ""}, {81, 81, "TCP", ""}, {82, 82, "Udp", ""}}, "[any:80->80/tcp any:81->81/tcp any:82->82/udp]"},
		{"one port, two protocols", []portMapping{{53, 53, "tcp", ""}, {53, 53, "udp", ""}}, "[any:53->53/tcp any:53->53/udp]"},
		{"one port, two addresses", []portMapping{{53, 53, "tcp", "192.0.2.1"}, {53, 54, "tcp", "2001:db8::1"}}, "[192.0.2.1:53->53/tcp 2001:db8::1:53->54/tcp]"},
		{"mapped address is IPv4", []portMapping{{53, 53, "tcp", "::ffff:192.0.2.1"}}, "[192.0.2.1:53->53/tcp]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			ports, err := parsePorts(test.asked)
			if err != nil {
				t.Fatal(err)
			}
			var texts []string
			for _, p := range ports {
				addr := "any"
				if p.HostAddr.IsValid() {
					addr = p.HostAddr.String()
				}
				texts = append(texts, fmt.Sprintf("%s:%d->%d/%s", addr, p.HostPort, p.ContainerPort, p.Protocol))
			}
			if got := fmt.Sprint(texts); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func TestParsePortsErrors(t *testing.T) {
	good := portMapping{HostPort: 80, ContainerPort: 80}
	for _, test := range []struct {
		bad  portMapping
		code uint
		key  string
	}{
		{portMapping{0, 80, "tcp", ""}, cnitypes.ErrInvalidNetworkConfig, "hostPort 0"},
		{portMapping{65536, 80, "tcp", ""}, cnitypes.ErrInvalidNetworkConfig, "hostPort 65536"},
		{portMapping{81, 0, "tcp", ""}, cnitypes.ErrInvalidNetworkConfig, "containerPort 0"},
		{portMapping{81, -1, "tcp", ""}, cnitypes.ErrInvalidNetworkConfig, "containerPort -1"},
		{portMapping{81, 80, "icmp", ""}, cnitypes.ErrInvalidNetworkConfig, `protocol "icmp"`},
		{portMapping{81, 80, "SCTP", ""}, cnitypes.ErrUnsupportedField, `protocol "SCTP"`},
		{portMapping{81, 80, "tcp", "here"}, cnitypes.ErrInvalidNetworkConfig, `hostIP "here"`},
		{portMapping{81, 80, "tcp", "fe80::1%eth0"}, cnitypes.ErrInvalidNetworkConfig, `hostIP "fe80::1%eth0"`},
		{good, cnitypes.ErrInvalidNetworkConfig, "hostPort 80"},
	} {
		t.Run(test.key, func(t *testing.T) {
			_, err := parsePorts([]portMapping{good, test.bad})
			wantCode(t, err, test.code, "runtimeConfig.portMappings[1]."+test.key)
		})
	}
}

func TestEntriesFor(t *testing.T) {
	endpoint := func(addr string) maps.Endpoint {
		return maps.Endpoint{Addr: netip.MustParseAddr(addr), Owner: 7, Network: 9}
	}
	dual := []maps.Endpoint{endpoint("10.88.0.2"), endpoint("fd00::2"), endpoint("10.89.0.2")}
	for _, test := range []struct {
		name, hostIP string
		endpoints    []maps.Endpoint
		want         []string
	}{
		{"any", "", dual, []string{"tcp 0.0.0.0:8080 forwards to 10.88.0.2:80", "tcp [::]:8080 forwards to [fd00::2]:80"}},
		{"any of IPv4", "0.0.0.0", dual, []string{"tcp 0.0.0.0:8080 forwards to 10.88.0.2:80"}},
		{"any of IPv6", "::", dual, []string{"tcp [::]:8080 forwards to [fd00::2]:80"}},
		{"IPv6 address", "2001:db8::1", dual, []string{"tcp [2001:db8::1]:8080 forwards to [fd00::2]:80"}},
		{"family that is missing", "2001:db8::1", dual[:1], nil},
		{"first of a family serves", "", []maps.Endpoint{dual[2], dual[0]}, []string{"tcp 0.0.0.0:8080 forwards to 10.89.0.2:80"}},
		{"no addresses", "", nil, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			mapping, err := portMapping{HostPort: 8080, ContainerPort: 80, HostIP: test.hostIP}.parse("key")
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, port := range mapping.entriesFor(test.endpoints) {
				got = append(got, port.String())
				if port.Owner != 7 || port.Network != 9 {
					t.Errorf("entry %v has owner %d, network %d", port, port.Owner, port.Network)
				}
			}
			if strings.Join(got, "\n") != strings.Join(test.want, "\n") {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
