package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestPortOfListener asks for host ports at which a process of the host listens: an ADD
// would take its clients, so it is refused, and names the process.
func TestPortOfListener(t *testing.T) {
	h := newHost(t)
	warmUp := h.pod(t, "c0", dual("1.1.0"))
	warmUp.add(t)
	warmUp.del(t)
	for _, test := range []struct {
		name, protocol, listens, hostIP string
		refused                         bool
	}{
		{"any on any", "tcp", "0.0.0.0", "", true},
		{"any on any, UDP", "udp", "0.0.0.0", "", true},
		{"any on any, IPv6", "tcp", "::", "", true},
		{"any on any, IPv6 and UDP", "udp", "::", "", true},
		{"any on one of the node's", "tcp", "192.0.2.1", "", true},
		{"any on loopback", "tcp", "127.0.0.1", "", true},
		{"the node's on any", "tcp", "0.0.0.0", "192.0.2.1", true},
		{"the node's on any, IPv6 and UDP", "udp", "::", "2001:db8:1::1", true},
		{"the node's on loopback", "tcp", "127.0.0.1", "192.0.2.1", false},
		{"the node's on the same of IPv6", "tcp", "2001:db8:1::1", "192.0.2.1", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			addr := netip.AddrPortFrom(netip.MustParseAddr(test.listens), 8080)
			pid := testenv.ForeignListener(t, h.Node, test.protocol, addr)
			p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
				object{"hostPort": 8080, "containerPort": 80, "protocol": test.protocol, "hostIP": test.hostIP},
			}))
			before := h.state(t, p.Namespace)
			if test.refused {
				wantError(t, p.try(t, "ADD"), plugin.CodePortTaken, "8080", test.protocol, fmt.Sprintf("perl (pid %d)", pid))
			} else {
				p.add(t)
				p.del(t)
			}
			h.wantState(t, before, p.Namespace)
		})
	}
}

// TestPortOfOtherProtocol is not the listener's.
func TestPortOfOtherProtocol(t *testing.T) {
	h := newHost(t)
	testenv.ForeignListener(t, h.Node, "udp", netip.MustParseAddrPort("0.0.0.0:8080"))
	p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
		object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
	}))
	p.add(t)
	p.del(t)
}

// TestPortOfRuntime is reserved by a listener of the process that starts the plugin, which is
// what podman does for the life of a container: clients reach the container.
func TestPortOfRuntime(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
		object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
	}))
	const runtime = `#!/usr/bin/perl
use Socket;
socket(my $s, AF_INET, SOCK_STREAM, 0) or die $!;
bind($s, pack_sockaddr_in(8080, INADDR_ANY)) or die $!;
listen($s, 1) or die $!;
exit(system("%s") >> 8);
`
	plugin := h.plugin
	h.plugin = filepath.Join(t.TempDir(), "runtime")
	if err := os.WriteFile(h.plugin, fmt.Appendf(nil, runtime, plugin), 0o755); err != nil {
		t.Fatal(err)
	}
	result := p.add(t)
	h.plugin = plugin
	testenv.ForeignListener(t, h.Node, "tcp", netip.MustParseAddrPort("0.0.0.0:8080")) // goes on listening
	wantFetch(t, h, p.Namespace, result)
	p.del(t)
}
