package conformance

import (
	"net"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// generation returns the number by which the programs recognize whether a cached decision is still valid.
func (h *host) generation(t *testing.T) (generation uint64) {
	t.Helper()
	h.withDatapath(t, func(d *loader.Datapath) error {
		if err := d.OpenOnDemand(bpf.MapGeneration); err != nil {
			return err
		}
		return d.Generation.Lookup(uint32(0), &generation)
	})
	return generation
}

// TestGeneration checks that whatever changes containers, host ports or uplinks makes a new generation, and that
// what only looks makes none.
func TestGeneration(t *testing.T) {
	h := newHost(t)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	port := object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}
	conf := with(dual("1.1.0"), "runtimeConfig.portMappings", list{port})
	p, failing := h.pod(t, "c2", conf), h.pod(t, "c3", conf)
	before := h.generation(t)
	want := func(what string, isNew bool) {
		t.Helper()
		now := h.generation(t)
		if isNew != (now != before) {
			t.Errorf("generation after %s: got %d after %d, want a new one: %v", what, now, before, isNew)
		}
		before = now
	}
	p.add(t)
	want("ADD", true)
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	h.wantCtl(t, 0, []string{"status"})
	want("CHECK and STATUS", false)
	if call := failing.try(t, "ADD"); call.Exit == 0 {
		t.Error("ADD with a host port of another container succeeded")
	}
	want("a failed ADD", true)
	h.wantCtl(t, 0, []string{"set", "pods/c2", "ingressPolicy=isolated"}, "isolated")
	want("set", true)
	h.wantCtl(t, 0, []string{"repair"}, "nothing to repair")
	want("repair", true)
	h.addUplink(t, "uplink1")
	want("an uplink that is new to STATUS", true)
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	want("STATUS with nothing new", false)
	p.del(t)
	want("DEL", true)
	h.gc(t, withKey(dual("1.1.0"), currentKey, attachments()))
	want("GC", true)
}

// addUplink gives the node another device with a subnet, which STATUS finds.
func (h *host) addUplink(t *testing.T, name string) {
	t.Helper()
	device := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, Flags: net.FlagUp}}
	address := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(192, 0, 3, 1), Mask: net.CIDRMask(24, 32)}}
	err := h.Node.Netlink().LinkAdd(device)
	if err == nil {
		err = h.Node.Netlink().AddrAdd(device, address)
	}
	testenv.Must(t, err)
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
}

// TestPortNumbers checks that the numbers of host ports stay known when the host ports are gone.
func TestPortNumbers(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.1.0"), "runtimeConfig.portMappings", list{
		object{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
		object{"hostPort": 8087, "containerPort": 81, "protocol": "tcp"}, // in one word with 8080
		object{"hostPort": 65535, "containerPort": 53, "protocol": "udp"},
		object{"hostPort": 8128, "containerPort": 82, "protocol": "tcp", "hostIP": "127.0.0.1"},
	}))
	const tcp, udp, exact = bpf.PortForwarded << 16, (bpf.PortForwarded + 1) << 16, bpf.PortForwardedExact << 16
	want := []int{tcp + 8080, tcp + 8087, tcp + 8128, udp + 65535, exact + 8128}
	check := func(when string) {
		t.Helper()
		var marked []int
		h.withDatapath(t, func(d *loader.Datapath) error {
			if err := d.OpenOnDemand(bpf.MapPortMarks); err != nil {
				return err
			}
			for word := range d.PortMarks.MaxEntries() {
				var marks [8]byte
				if err := d.PortMarks.Lookup(word, &marks); err != nil {
					return err
				}
				for i, mark := range marks {
					if mark != 0 {
						marked = append(marked, int(word)*len(marks)+i)
					}
				}
			}
			return nil
		})
		if !slices.Equal(marked, want) {
			t.Errorf("marked ports %s: got %d, want %d", when, marked, want)
		}
	}
	p.add(t)
	check("after ADD")
	p.del(t)
	check("after DEL")
	p.add(t)
	check("after another ADD")
	p.del(t)
}

// TestUpgradeKeepsConfig checks that other programs go on with the secret, the ports and the buckets of the first.
func TestUpgradeKeepsConfig(t *testing.T) {
	h := newHost(t)
	h.pod(t, "c1", with(dual("1.1.0"), "maxFlows", 2048)).add(t)
	config := func() (config bpf.HostConfig) {
		h.withDatapath(t, func(d *loader.Datapath) error {
			config = d.Config
			if got, want := config.FlowBuckets, d.FlowBuckets.MaxEntries(); got != want || want != 2048/16 {
				t.Errorf("buckets of flow_table: got %d, want %d", got, want)
			}
			return nil
		})
		return config
	}
	before := config()
	if before.Secret == [2]uint64{} {
		t.Error("no secret")
	}
	other := loader.Embedded()
	other.Build++
	testenv.Must(t, h.Node.Upgrade(testenv.Context(t), other))
	after := config()
	before.Build = other.Build
	if after != before {
		t.Errorf("configuration: got %+v, want %+v", after, before)
	}
	h.gc(t, withKey(dual("1.1.0"), currentKey, attachments()))
}
