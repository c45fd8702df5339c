package conformance

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
)

// TestPortTaken asks for ports that another container has, or that only look alike.
func TestPortTaken(t *testing.T) {
	h := newHost(t)
	holder := h.pod(t, "holder", with(dual("1.0.0"), "runtimeConfig.portMappings", list{
		object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
		object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "192.0.2.1"},
	}))
	holder.add(t)
	for _, test := range []struct {
		name    string
		mapping object
		taken   bool
	}{
		{"same", object{"hostPort": 8080, "containerPort": 81, "protocol": "tcp"}, true},
		{"same, in other words", object{"HostPort": 8080, "ContainerPort": 80, "Protocol": "TCP", "HostIP": "0.0.0.0"}, true},
		{"same of one family", object{"hostPort": 8080, "containerPort": 80, "hostIP": "::"}, true},
		{"other protocol", object{"hostPort": 8080, "containerPort": 80, "protocol": "udp"}, false},
		{"other port", object{"hostPort": 8082, "containerPort": 80, "protocol": "tcp"}, false},
		{"same host address", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "192.0.2.1"}, true},
		{"other host address", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "192.0.2.7"}, false},
		{"other family", object{"hostPort": 8081, "containerPort": 80, "protocol": "udp", "hostIP": "2001:db8:1::1"}, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", list{test.mapping}))
			before := h.state(t, p.Namespace, holder.Namespace)
			if test.taken {
				wantError(t, p.try(t, "ADD"), cnierr.CodePortTaken, "808", "holder")
			} else {
				p.add(t)
				wantSuccess(t, p.try(t, "CHECK"), "")
				p.del(t)
			}
			h.wantState(t, before, p.Namespace, holder.Namespace)
		})
	}
	wantSuccess(t, holder.try(t, "CHECK"), "")
}

// TestPortSpelling gives mappings as podman and as containerd spell them: both mean the same.
func TestPortSpelling(t *testing.T) {
	h := newHost(t)
	for name, mapping := range map[string]object{
		"podman":                 {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
		"podman, any address":    {"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""},
		"containerd":             {"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""},
		"protocol in upper case": {"HostPort": 8080, "ContainerPort": 80, "Protocol": "TCP", "HostIP": ""},
		"no protocol":            {"hostPort": 8080, "containerPort": 80},
		"keys of tomorrow":       {"hostPort": 8080, "containerPort": 80, "appProtocol": "http"},
	} {
		t.Run(name, func(t *testing.T) {
			p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", list{mapping}))
			before := h.state(t, p.Namespace)
			wantFetch(t, h, p.Namespace, p.add(t))
			p.del(t)
			h.wantState(t, before, p.Namespace)
		})
	}
}

// TestPortFamily maps by an address of a family that the container lacks: an entry that
// does not fit is left out, as portmap does.
func TestPortFamily(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(single("1.0.0"), "runtimeConfig.portMappings", list{
		object{"hostPort": 8080, "containerPort": 80, "hostIP": "2001:db8:1::1"},
	}))
	p.add(t)
	for thing := range h.state(t, p.Namespace) {
		if len(thing) > 5 && thing[:5] == "port " {
			t.Errorf("made %s", thing)
		}
	}
	wantSuccess(t, p.try(t, "CHECK"), "")
}
