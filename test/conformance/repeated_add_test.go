package conformance

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func TestRepeatedAdd(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	result := p.add(t)
	for name, again := range map[string]*testenv.Namespace{
		"same namespace":    p.Namespace,
		"another namespace": testenv.New(t, "other"),
	} {
		t.Run(name, func(t *testing.T) {
			before := h.snapshot(t, p.Namespace, again)
			twin := *p
			twin.Namespace, twin.result = again, nil
			wantError(t, twin.try(t, "ADD"), cnierr.CodeAttachmentExists, "c1", "eth0", "pods")
			h.wantUnchanged(t, before, p.Namespace, again)
		})
	}
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
	wantPing(t, h.Node, addresses(result)...)
}

func TestInterfaceNameInUse(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.0.0"))
	other := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "peer"}
	testenv.Must(t, p.Netlink().LinkAdd(other))
	before := h.snapshot(t, p.Namespace)
	wantError(t, p.try(t, "ADD"), codeInvalidEnv, "CNI_IFNAME", "eth0")
	h.wantUnchanged(t, before, p.Namespace)
}

// TestTwoInterfaces attaches two interfaces to one container, in one network and in two.
func TestTwoInterfaces(t *testing.T) {
	h := newHost(t)
	other := with(dual("1.0.0"), "name", "others")
	other = with(other, "ipam.ranges", list{list{object{"subnet": "10.89.0.0/16"}}, list{object{"subnet": "fd00:89::/64"}}})
	other = with(other, "ipam.routes", list{})
	for name, conf := range map[string]object{
		"one network":  dual("1.0.0"),
		"two networks": other,
	} {
		t.Run(name, func(t *testing.T) {
			first := h.pod(t, "c1", dual("1.0.0"))
			before := h.snapshot(t, first.Namespace)
			second := first.second(t, "net1")
			second.conf = conf
			firstResult := first.add(t)
			wantPing(t, first.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
			withFirst := h.snapshot(t, first.Namespace)
			secondResult := second.add(t)
			wantPing(t, h.Node, addresses(firstResult)...)
			wantPing(t, h.Node, addresses(secondResult)...)
			wantSuccess(t, first.try(t, "CHECK"), "")
			wantSuccess(t, second.try(t, "CHECK"), "")
			second.del(t)
			h.wantUnchanged(t, withFirst, first.Namespace)
			first.del(t)
			h.wantUnchanged(t, before, first.Namespace)
		})
	}
}

// TestStaleReservation adds a container whose reservation has outlived its device, as after a crash or a
// reboot.
func TestStaleReservation(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", with(dual("1.0.0"), "runtimeConfig.portMappings", webPort))
	before := h.snapshot(t, p.Namespace)

	t.Run("reservation only", func(t *testing.T) {
		dir := filepath.Join(testenv.ReservationDir, "pods")
		testenv.Must(t, os.MkdirAll(dir, 0o755))
		testenv.Must(t, os.WriteFile(filepath.Join(dir, "10.88.0.9"), []byte("c1\r\neth0"), 0o644))
		p.add(t)
		wantSuccess(t, p.try(t, "CHECK"), "")
		p.del(t)
		h.wantUnchanged(t, before, p.Namespace)
	})
	t.Run("reservation and entries", func(t *testing.T) {
		first := addresses(p.add(t))
		other := h.pod(t, "c2", dual("1.0.0"))
		other.add(t) // advances the round robin
		testenv.Must(t, p.Netlink().LinkDel(p.device(t)))
		if again := addresses(p.add(t)); !slices.Equal(again, first) {
			t.Errorf("addresses: got %v, want %v again", again, first)
		}
		other.del(t)
		wantSuccess(t, p.try(t, "CHECK"), "")
		p.del(t)
		h.wantUnchanged(t, before, p.Namespace)
	})
}
