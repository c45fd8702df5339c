package conformance

import (
	"fmt"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// TestHostPortConflict requests host ports that another container has, and similar ones that are free.
func TestHostPortConflict(t *testing.T) {
	h := newHost(t)
	holder := h.pod(t, "holder", with(dual("1.0.0"), "runtimeConfig.portMappings", list{
		object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
		object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "192.0.2.1"},
	}))
	holder.add(t)
	for _, test := range []struct {
		name    string
		mapping object
		inUse   bool
	}{
		{"same", object{"hostPort": 8080, "containerPort": 81, "protocol": "tcp"}, true},
		{"same, spelled differently", object{"HostPort": 8080, "ContainerPort": 80, "Protocol": "TCP", "HostIP": "0.0.0.0"}, true},
		{"same, one family", object{"hostPort": 8080, "containerPort": 80, "hostIP": "::"}, true},
		{"other protocol", object{"hostPort": 8080, "containerPort": 80, "protocol": "udp"}, false},
		{"other port", object{"hostPort": 8082, "containerPort": 80, "protocol": "tcp"}, false},
		{"same host address", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "192.0.2.1"}, true},
		{"other host address", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "192.0.2.7"}, false},
		{"one host address", object{"hostPort": 8080, "containerPort": 80, "hostIP": "192.0.2.1"}, true},
		{"one IPv6 address", object{"hostPort": 8080, "containerPort": 80, "hostIP": "::1"}, true},
		{"any host address", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp"}, true},
		{"any IPv6 address", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "::"}, false},
		{"other family", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "2001:db8:1::1"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", list{test.mapping}))
			before := h.snapshot(t, p.Namespace, holder.Namespace)
			if test.inUse {
				wantError(t, p.try(t, "ADD"), cnierr.CodePortTaken, "808", "holder")
			} else {
				p.add(t)
				wantSuccess(t, p.try(t, "CHECK"), "")
				p.del(t)
			}
			h.wantUnchanged(t, before, p.Namespace, holder.Namespace)
		})
	}
	wantSuccess(t, holder.try(t, "CHECK"), "")
}

// TestHostPortOfSeveral gives a port on all addresses to a container after two that had one each have vanished.
func TestHostPortOfSeveral(t *testing.T) {
	h := newHost(t)
	for i, address := range []string{"192.0.2.1", "127.0.0.1"} {
		p := h.pod(t, fmt.Sprint("gone", i), with(dual("1.0.0"), "runtimeConfig.portMappings", list{
			object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": address},
		}))
		p.add(t)
		p.vanish(t)
		defer p.del(t)
	}
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	call := p.try(t, "ADD")
	call.Stderr = nil // it names those that are gone
	wantSuccess(t, call, anything)
	p.result, _ = decode(t, call.Stdout).(object)
	wantSuccess(t, p.try(t, "CHECK"), "")
	p.del(t)
}

// TestHostPortTwice maps one port on any host address and on one, which lead to different ports of the container.
func TestHostPortTwice(t *testing.T) {
	h := newLoadedHost(t)
	everywhere, here := webPort[0], object{"hostPort": 8080, "containerPort": 81, "protocol": "tcp", "hostIP": "192.0.2.1"}
	for range 2 { // the second time the number is known
		for _, mappings := range []list{{everywhere, here}, {here, everywhere}} {
			p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", mappings))
			p.add(t)
			wantSuccess(t, p.try(t, "CHECK"), "")
			p.del(t)
		}
	}
}
