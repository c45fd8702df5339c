package conformance

import (
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var webPort = list{object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}

func TestDel(t *testing.T) {
	h := newHost(t)
	conf := with(dual("1.0.0"), "runtimeConfig.portMappings", webPort)
	for _, test := range []struct {
		name string
		// change is applied between ADD and DEL, to the pod or to the runtime's knowledge of it.
		change func(t *testing.T, p *pod)
	}{
		{"unchanged", func(*testing.T, *pod) {}},
		{"twice", func(t *testing.T, p *pod) { p.del(t) }},
		{"without prevResult", func(_ *testing.T, p *pod) { p.result = nil }},
		{"without runtimeConfig", func(_ *testing.T, p *pod) { p.conf = dual("1.0.0") }},
		{"unknown key", func(_ *testing.T, p *pod) { p.conf = with(conf, "ipmask", true) }},
		{"other ranges", func(_ *testing.T, p *pod) {
			p.conf = with(conf, "ipam.ranges", list{list{object{"subnet": "10.99.0.0/24"}}})
		}},
		{"broken ranges", func(_ *testing.T, p *pod) { p.conf = with(conf, "ipam.ranges", "10.99.0.0/24") }},
		{"broken ipam", func(_ *testing.T, p *pod) { p.conf = with(conf, "ipam", "host-local") }},
		{"no ipam", func(_ *testing.T, p *pod) { p.conf = with(conf, "ipam", absent) }},
		{"broken ports", func(_ *testing.T, p *pod) { p.conf = with(conf, "runtimeConfig.portMappings", "8080") }},
		{"broken prevResult", func(_ *testing.T, p *pod) { p.conf, p.result = with(conf, "prevResult", "gone"), nil }},
		{"unknown CNI_ARGS", func(_ *testing.T, p *pod) { p.args = "FOO=bar" }},
		{"other version", func(_ *testing.T, p *pod) { p.conf = with(conf, "cniVersion", "0.4.0") }},
		{"interface gone", func(t *testing.T, p *pod) {
			testenv.Must(t, p.Netlink().LinkDel(p.device(t)))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", conf)
			before := h.snapshot(t, p.Namespace)
			p.add(t)
			test.change(t, p)
			wantSuccess(t, p.try(t, "DEL"), "")
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestDelWithoutAdd calls DEL for an unknown container, before and after the datapath is loaded.
func TestDelWithoutAdd(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.0.0"))
	before := h.snapshot(t, p.Namespace)
	wantSuccess(t, p.try(t, "DEL"), "")
	h.wantUnchanged(t, before, p.Namespace)

	neighbor := h.pod(t, "c2", dual("1.0.0"))
	neighbor.add(t)
	before = h.snapshot(t, p.Namespace, neighbor.Namespace)
	wantSuccess(t, p.try(t, "DEL"), "")
	h.wantUnchanged(t, before, p.Namespace, neighbor.Namespace)
}

// TestDelNamespace calls DEL with the values of CNI_NETNS that runtimes use for a dead container.
func TestDelNamespace(t *testing.T) {
	h := newHost(t)
	conf := with(dual("1.0.0"), "runtimeConfig.portMappings", webPort)
	for _, test := range []struct {
		name   string
		vanish bool
		netns  func(p *pod) string
	}{
		{"empty, namespace exists", false, func(*pod) string { return "" }},
		{"empty, namespace gone", true, func(*pod) string { return "" }},
		{"path of a vanished namespace", true, func(p *pod) string { return p.Path }},
		{"of another container", false, func(p *pod) string { return testenv.New(t, "other").Path }},
		{"path of a file", false, func(*pod) string { return "/proc/self/stat" }},
		{"of the host", false, func(*pod) string { return h.Node.Path }}, // /proc/PID/ns/net, if a process of the host has the PID now
	} {
		t.Run(test.name, func(t *testing.T) {
			before := h.snapshot(t)
			p := h.pod(t, "c1", conf)
			p.add(t)
			if test.vanish {
				p.vanish(t)
			}
			env := p.env("DEL")
			env["CNI_NETNS"] = test.netns(p)
			wantSuccess(t, h.call(t, env, encode(t, conf)), "")
			h.wantUnchanged(t, before)
		})
	}
}
