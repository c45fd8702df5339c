package conformance

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// chainedPod makes a container with an interface like ptp's, and the configuration of an ebpfnet chained after it
// that uses all of its features.
func (h *host) chainedPod(t *testing.T) *pod {
	t.Helper()
	const address, gateway = "10.88.0.9", "10.88.0.1"
	conf := with(with(single("1.1.0"), "ipam", absent), "runtimeConfig.portMappings", webPort)
	conf = with(with(conf, "runtimeConfig.aliases", list{"web"}), "txQLen", 77)
	conf = with(with(conf, "allmulti", true), "sysctl", object{"net.core.somaxconn": "500"})
	p := h.pod(t, "c1", conf)
	h.makePTPLink(t, p, address, gateway)
	p.conf = with(conf, "prevResult", object{
		"cniVersion": "1.1.0",
		"interfaces": list{
			object{"name": "before", "mac": p.peer(t).Attrs().HardwareAddr.String()},
			object{"name": "eth0", "mac": p.device(t).Attrs().HardwareAddr.String(), "sandbox": p.Path},
		},
		"ips":    list{object{"interface": 1, "address": address + "/32", "gateway": gateway}},
		"routes": list{object{"dst": "0.0.0.0/0"}},
		"dns":    object{},
	})
	return p
}

// peer returns the host's end of the link of makePTPLink.
func (p *pod) peer(t *testing.T) netlink.Link {
	t.Helper()
	link, err := p.host.Node.Netlink().LinkByName("before")
	testenv.Must(t, err)
	return link
}

// makePTPLink connects the node and a container by a veth, with addresses and routes.
func (h *host) makePTPLink(t *testing.T, p *pod, address, gateway string) {
	t.Helper()
	single := func(ip string) *net.IPNet { return &net.IPNet{IP: net.ParseIP(ip).To4(), Mask: net.CIDRMask(32, 32)} }
	must := func(err error) {
		t.Helper()
		testenv.Must(t, err)
	}
	node, container := h.Node.Netlink(), p.Netlink()
	file, err := os.Open(h.Node.Path)
	must(err)
	defer file.Close()
	must(container.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "before", PeerNamespace: netlink.NsFd(file.Fd())}))
	peer, device := p.peer(t), p.device(t)
	must(node.AddrAdd(peer, &netlink.Addr{IPNet: single(gateway)}))
	must(container.AddrAdd(device, &netlink.Addr{IPNet: single(address)}))
	must(node.LinkSetUp(peer))
	must(container.LinkSetUp(device))
	must(node.RouteAdd(&netlink.Route{LinkIndex: peer.Attrs().Index, Dst: single(address), Scope: netlink.SCOPE_LINK}))
	must(container.RouteAdd(&netlink.Route{LinkIndex: device.Attrs().Index, Dst: single(gateway), Scope: netlink.SCOPE_LINK}))
	all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	must(container.RouteAdd(&netlink.Route{LinkIndex: device.Attrs().Index, Dst: all, Gw: single(gateway).IP}))
}

// tuned returns the container's settings that a chained ebpfnet changes and DEL restores.
func tuned(t *testing.T, p *pod) string {
	t.Helper()
	somaxconn, err := p.Sysctl("net/core/somaxconn")
	testenv.Must(t, err)
	attrs := p.device(t).Attrs()
	return fmt.Sprint(attrs.Allmulti, attrs.TxQLen, somaxconn)
}

// TestChainedSteps makes a chained ADD fail before each of its steps, and kills it there. A failed one leaves only
// what the previous plugin has made; DEL removes the rest of a killed one.
func TestChainedSteps(t *testing.T) {
	h := newHost(t)
	p := h.chainedPod(t)
	before, settings := h.snapshot(t, p.Namespace), tuned(t, p)
	want := func(t *testing.T) {
		t.Helper()
		h.wantUnchanged(t, before, p.Namespace)
		if got := tuned(t, p); got != settings {
			t.Errorf("settings of the container: got %s, want %s", got, settings)
		}
	}
	for _, step := range learnAddSteps(t, p) {
		t.Run("fails before "+step, func(t *testing.T) {
			failAndRetry(t, p, before, fault{FailBefore: step})
			want(t)
		})
		t.Run("killed before "+step, func(t *testing.T) {
			if call, stopped := p.addWithFault(t, fault{KillBefore: step}); stopped || call.Exit != -1 {
				t.Fatalf("ADD: got %+v, want SIGKILL", call)
			}
			p.del(t)
			want(t)
		})
	}
	t.Run("fails to print the result", func(t *testing.T) {
		failAndRetry(t, p, before, fault{FailPrint: true})
		want(t)
	})
}

// TestChainedVerbs calls every verb for a chained container.
func TestChainedVerbs(t *testing.T) {
	h := newHost(t)
	p := h.chainedPod(t)
	before, settings := h.snapshot(t, p.Namespace), tuned(t, p)
	result := p.add(t)
	wantFetch(t, h, p.Namespace, result)
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantSuccess(t, h.status(t, with(with(p.conf, "prevResult", absent), "runtimeConfig", absent)), "")
	p.result = nil
	wantError(t, p.try(t, "ADD"), cnierr.CodeAttachmentExists, "c1", "before")
	h.gc(t, withKey(p.conf, currentKey, attachments("c1")))
	wantSuccess(t, p.try(t, "CHECK"), "")
	p.del(t)
	h.wantUnchanged(t, before, p.Namespace)
	if got := tuned(t, p); got != settings {
		t.Errorf("settings of the container after DEL: got %s, want %s", got, settings)
	}
}

// TestChainedDelElsewhere calls DEL of an adopted container with the path of a process that has ended, which is that of
// another container or of the host by now. DEL changes nothing there, and does not pass the path on.
func TestChainedDelElsewhere(t *testing.T) {
	h := newHost(t)
	dir, _ := installIPAMScript(t, "maker", `echo "at $CNI_NETNS" >$(dirname $0)/netns`)
	h.path = dir
	conf := with(with(single("1.1.0"), "egressRate", 100000000), "txQLen", 77)
	conf = with(with(conf, "allmulti", true), "sysctl", object{"net.core.somaxconn": "500"})
	other := h.pod(t, "c2", conf)
	other.add(t)
	for name, test := range map[string]struct {
		path   func(*pod) string
		passed bool
	}{
		"its own":    {func(p *pod) string { return p.Path }, true},
		"another's":  {func(*pod) string { return other.Path }, false},
		"the host's": {func(*pod) string { return h.Node.Path }, false},
	} {
		t.Run(name, func(t *testing.T) {
			p := h.chainedPod(t)
			p.conf = with(p.conf, "egressRate", 100000000)
			p.add(t)
			h.adopt(t, p, record.OtherPlugin{Type: "maker", Config: encode(t, object{"cniVersion": "1.1.0", "name": "pods", "type": "maker"})})
			p.conf = with(p.conf, "ipam", conf["ipam"])
			want := "at \n"
			if test.passed {
				want = "at " + p.Path + "\n"
			}
			wantSuccess(t, p.tryAt(t, "DEL", test.path(p)), "")
			testenv.Must(t, h.Node.Netlink().LinkDel(p.peer(t)))
			if got := string(testenv.ReadFile(t, filepath.Join(dir, "netns"))); got != want {
				t.Errorf("CNI_NETNS of the plugin that made the container: got %q, want %q", got, want)
			}
			wantSuccess(t, other.try(t, "CHECK"), "")
		})
	}
	other.del(t)
}

// adopt writes into a container's record who has made it, as ebpfnetctl migrate does.
func (h *host) adopt(t *testing.T, p *pod, others ...record.OtherPlugin) {
	t.Helper()
	h.withDatapath(t, func(*loader.Datapath) error {
		records, err := record.Open(record.DefaultDir)
		if err != nil {
			return err
		}
		rec, err := records.Read(maps.Attachment{Network: "pods", ContainerID: p.id, IfName: p.ifName}.Owner())
		if err != nil {
			return err
		}
		rec.Others = others
		return records.Write(rec)
	})
}

// TestChainedPrograms attaches programs to a device that is up by links: for a qdisc the kernel would stop it. They are
// repaired and upgraded like others.
func TestChainedPrograms(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	h := newHost(t)
	p := h.chainedPod(t)
	result := p.add(t)
	if qdiscs, err := h.Node.Run(testenv.Context(t), "tc", "qdisc", "show", "dev", "before"); err != nil || strings.Contains(qdiscs, "clsact") {
		t.Errorf("qdiscs: got %s (%v), want no clsact", qdiscs, err)
	}
	for _, damage := range []func(*testing.T, *pod, *types100.Result){
		forceDetach("endpoint-*-to_container"), removePin("endpoint-*-from_container"),
	} {
		damage(t, p, result)
		call := p.try(t, "CHECK")
		wantError(t, call, cnierr.CodeDiffers, "before has lost its BPF programs", repairHint)
		wantRepaired(t, p, call)
	}

	other := loader.Embedded()
	other.Build++
	h.ip(t, "link add gone type veth")
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		before, errBefore := net.InterfaceByName("before")
		gone, errGone := net.InterfaceByName("gone")
		if err := errors.Join(errBefore, errGone); err != nil {
			return err
		}
		if err := errors.Join(datapath.AttachEndpoint(before.Index), datapath.AttachLiveEndpoint(gone.Index)); err != nil { // as an older version attaches
			return err
		}
		h.ip(t, "link del gone")
		if _, err := loader.Upgrade(testenv.Context(t), loader.Options{Programs: &other}); err != nil {
			return err
		}
		for _, hook := range []string{bpf.ProgFromContainer, bpf.ProgToContainer} {
			program, err := ebpf.LoadPinnedProgram(filepath.Join(datapath.Dir(), "progs", loader.BuildID(other.Build).String(), hook), nil)
			if err != nil {
				return err
			}
			defer program.Close()
			attached, err := link.LoadPinnedLink(linkPin(t, "endpoint-*-"+hook), nil)
			if err != nil {
				return err
			}
			defer attached.Close()
			wanted, errProgram := program.Info()
			info, errLink := attached.Info()
			if err := errors.Join(errProgram, errLink); err != nil {
				return err
			}
			if id, _ := wanted.ID(); info.Program != id {
				t.Errorf("%s after an upgrade: got program %d, want %d", hook, info.Program, id)
			}
		}
		pins, err := filepath.Glob(filepath.Join(datapath.Dir(), "links", fmt.Sprintf("endpoint-%d-*", gone.Index)))
		if len(pins) > 0 {
			t.Errorf("after an upgrade: got links of a device that is gone: %v", pins)
		}
		return err
	})
	for _, direction := range []string{"ingress", "egress"} {
		if filters, err := h.Node.Run(testenv.Context(t), "tc", "filter", "show", "dev", "before", direction); err != nil || filters != "" {
			t.Errorf("%s filters beside links, after an upgrade: got %q (%v), want none", direction, filters, err)
		}
	}
	p.vanish(t)
	p.del(t)
}

// TestChainedHolder asks for the host port and the address of a chained container that is alive, whose network has
// another dataDir. So the caller sees no record of it.
func TestChainedHolder(t *testing.T) {
	h := newHost(t)
	holder := h.chainedPod(t)
	holder.conf = with(holder.conf, "dataDir", filepath.Join(t.TempDir(), "records"))
	holder.conf = with(holder.conf, "name", "bridged")
	result := holder.add(t)
	for _, test := range []struct {
		name string
		conf object
		code uint
	}{
		{"port", with(dual("1.1.0"), "runtimeConfig.portMappings", webPort), cnierr.CodePortTaken},
		{"address", with(dual("1.1.0"), "runtimeConfig.ips", list{"10.88.0.9"}), cnierr.CodeAddressTaken},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c2", test.conf)
			before := h.snapshot(t, p.Namespace, holder.Namespace)
			wantError(t, p.try(t, "ADD"), test.code, "(before)")
			h.wantUnchanged(t, before, p.Namespace, holder.Namespace)
		})
	}
	wantSuccess(t, holder.try(t, "CHECK"), "")
	wantFetch(t, h, holder.Namespace, result)
	holder.del(t)
}

// TestChainedDelWithoutRecord calls DEL after the record of a chained container is lost. The datapath knows its
// device; the previous plugin's address stays reserved.
func TestChainedDelWithoutRecord(t *testing.T) {
	h := newHost(t)
	p := h.chainedPod(t)
	address := filepath.Join(testenv.ReservationDir, "pods", "10.88.0.9")
	err := errors.Join(os.MkdirAll(filepath.Dir(address), 0o755), os.WriteFile(address, []byte(p.id+"\r\n"+p.ifName), 0o644))
	testenv.Must(t, err)
	before := h.snapshot(t, p.Namespace)
	p.conf = with(with(p.conf, "sysctl", absent), "txQLen", absent) // only a record says what to restore
	p.conf = with(p.conf, "allmulti", absent)
	p.add(t)
	testenv.Must(t, os.RemoveAll(record.DefaultDir))
	p.del(t)
	if pins, _ := filepath.Glob(filepath.Join(loader.Root, "*", "links", "endpoint-*")); len(pins) > 0 {
		t.Errorf("after DEL: got links %v, want none", pins)
	}
	h.wantUnchanged(t, before, p.Namespace)
	testenv.Must(t, os.RemoveAll(filepath.Dir(address)))
}

// TestChainedPairElsewhere has a container's veth lead to a third namespace, with the indexes of another container's veth. ADD must
// not take that one.
func TestChainedPairElsewhere(t *testing.T) {
	h := newHost(t)
	other := h.pod(t, "other", with(dual("1.1.0"), "runtimeConfig.portMappings", webPort))
	result := other.add(t)
	outside, inside := other.hostDevice(t, result).Attrs(), other.device(t).Attrs()
	p := h.pod(t, "c1", with(single("1.1.0"), "ipam", absent))
	_, err := p.Run(testenv.Context(t), "ip", "link", "add", "eth0", "index", fmt.Sprint(inside.Index), "type", "veth",
		"peer", "name", outside.Name, "index", fmt.Sprint(outside.Index))
	testenv.Must(t, err)
	third, err := os.Open(h.pod(t, "third", dual("1.1.0")).Path)
	testenv.Must(t, err)
	defer third.Close()
	outer, err := p.Netlink().LinkByName(outside.Name)
	testenv.Must(t, errors.Join(err, p.Netlink().LinkSetNsFd(outer, int(third.Fd()))))
	h.ip(t, "route add 10.99.0.9 dev "+outside.Name)
	p.conf = with(p.conf, "prevResult", object{
		"cniVersion": "1.1.0",
		"interfaces": list{object{"name": "eth0", "sandbox": p.Path}},
		"ips":        list{object{"interface": 0, "address": "10.99.0.9/32", "gateway": "10.99.0.1"}},
	})
	before := h.snapshot(t, p.Namespace)
	wantError(t, p.try(t, "ADD"), codeInvalidConfig, "prevResult.interfaces", "eth0", "other end is on the host")
	h.wantUnchanged(t, before, p.Namespace)
	wantSuccess(t, other.try(t, "CHECK"), "")
	wantFetch(t, h, other.Namespace, result)
}

// TestChainedGCWithoutRecord calls GC, without a list, after the record of a living chained container is lost. Nothing of it may go.
func TestChainedGCWithoutRecord(t *testing.T) {
	h := newHost(t)
	p := h.chainedPod(t)
	result := p.add(t)
	testenv.Must(t, os.RemoveAll(record.DefaultDir))
	before := h.snapshot(t, p.Namespace)
	h.gc(t, with(with(p.conf, "prevResult", absent), "runtimeConfig", absent))
	h.wantUnchanged(t, before, p.Namespace)
	wantFetch(t, h, p.Namespace, result)
	p.del(t)
}

// TestChainedUplink puts the device of a chained container on bridges that are uplinks, or have no address. ADD refuses them,
// and the uplinks keep their programs.
func TestChainedUplink(t *testing.T) {
	for _, test := range []struct {
		name  string
		setUp []string
		words []string
	}{
		{"no address", []string{"addr flush dev before"}, []string{"10.88.0.9", "no link", testenv.OutsideAddr4.String()}},
		{"default route", []string{"route add 10.88.0.9 dev eth0"}, []string{"eth0", "default route"}},
		{"port to a network", []string{
			"addr flush dev before", "link add nic type veth peer name far", "link add link nic name nic.7 type macvlan",
			"link add br0 type bridge", "link set br0 up", "link set nic.7 master br0",
			"link set before master br0", "addr add 10.88.0.1/24 dev br0",
		}, []string{"br0", "nic.7"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			testenv.Require(t, testenv.Macvlan)
			h := newHost(t)
			conf := with(single("1.1.0"), "ipam.ranges", list{list{object{"subnet": "10.89.0.0/16"}}})
			first := h.pod(t, "first", conf)
			first.add(t)
			p := h.chainedPod(t)
			h.ip(t, "route del 10.88.0.9")
			for _, args := range test.setUp {
				h.ip(t, args)
			}
			h.status(t, conf) // finds br0
			before := h.snapshot(t, p.Namespace)
			wantError(t, p.try(t, "ADD"), types.ErrUnsupportedField, test.words...)
			h.wantUnchanged(t, before, p.Namespace)
			first.del(t)
		})
	}
}
