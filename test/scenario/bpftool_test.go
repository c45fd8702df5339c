package scenario

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// The pinned maps have BTF: bpftool prints every field by name, with the values that package
// maps reads.

// dump runs bpftool and decodes each entry into T, which must have a field for everything that
// bpftool prints.
func dump[T any](t *testing.T, datapath *loader.Datapath, pin string) []T {
	t.Helper()
	requireTool(t, "bpftool", "bpftool")
	path := filepath.Join(datapath.Dir(), "maps", pin)
	output, err := exec.CommandContext(testenv.Context(t), "bpftool", "-j", "map", "dump", "pinned", path).Output()
	if err != nil {
		t.Fatalf("bpftool map dump pinned %s: %v: %s", path, err, output)
	}
	var entries []struct {
		Formatted json.RawMessage `json:"formatted"` // absent where the map has no BTF
	}
	if err := json.Unmarshal(output, &entries); err != nil {
		t.Fatalf("decode bpftool's dump of %s: %v: %s", pin, err, output)
	}
	var list []T
	for _, entry := range entries {
		var value T
		decoder := json.NewDecoder(bytes.NewReader(entry.Formatted))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&value); err != nil {
			t.Fatalf("decode bpftool's dump of %s: %v: %s", pin, err, entry.Formatted)
		}
		list = append(list, value)
	}
	return list
}

// wantSame compares what bpftool printed with what package maps reads, in any order.
func wantSame[T any](t *testing.T, pin string, dumped, read []T) {
	t.Helper()
	if len(read) == 0 {
		t.Errorf("map %s is empty, want entries to compare", pin)
	}
	if got, want := sortedText(dumped), sortedText(read); !slices.Equal(got, want) {
		t.Errorf("map %s: bpftool prints\n%q, package maps reads\n%q", pin, got, want)
	}
}

func sortedText[T any](list []T) []string {
	var text []string
	for _, value := range list {
		// %#v calls no String method, so every field counts.
		text = append(text, fmt.Sprintf("%#v", value))
	}
	slices.Sort(text)
	return text
}

type dumpedAddr struct {
	Bytes [16]byte `json:"bytes"`
}

func (a dumpedAddr) addr() netip.Addr { return netip.AddrFrom16(a.Bytes).Unmap() }

type dumpedEndpoint struct {
	Key   dumpedAddr `json:"key"`
	Value struct {
		Owner     uint64     `json:"owner"`
		Network   uint32     `json:"network"`
		IfIndex   int        `json:"ifindex"`
		MAC       [6]byte    `json:"mac"`
		HostMAC   [6]byte    `json:"host_mac"`
		Gateway   dumpedAddr `json:"gateway"`
		Flags     any        `json:"flags"`
		NonMasq   uint32     `json:"nonmasq_set"`
		Container uint64     `json:"container"`
		MTU       int        `json:"mtu"`
		FastPath  string     `json:"fast_path"`
		Pad       int        `json:"pad"`
		RouteSet  uint32     `json:"route_set"`
		Pad2      int        `json:"pad2"`
	} `json:"value"`
}

func (d dumpedEndpoint) endpoint() maps.Endpoint {
	v := d.Value
	return maps.Endpoint{
		Addr: d.Key.addr(), Owner: loader.Owner(v.Owner), Network: maps.Network(v.Network), IfIndex: v.IfIndex,
		MAC: v.MAC[:], HostMAC: v.HostMAC[:], Masq: v.Flags == "ENDPOINT_MASQ",
		Gateway: v.Gateway.addr(), NonMasq: maps.PrefixSet(v.NonMasq), Container: maps.Container(v.Container), Routes: maps.PrefixSet(v.RouteSet),
		MTU: v.MTU, FastPath: maps.FastPath(strings.ToLower(strings.TrimPrefix(v.FastPath, "FAST_PATH_"))),
	}
}

type dumpedHostPort struct {
	Key struct {
		Addr     dumpedAddr `json:"addr"`
		Port     uint16     `json:"port"`
		Protocol uint8      `json:"protocol"`
		Dir      string     `json:"dir"`
	} `json:"key"`
	Value struct {
		Owner   uint64     `json:"owner"`
		Addr    dumpedAddr `json:"target_addr"`
		Network uint32     `json:"network"`
		Port    uint16     `json:"target_port"`
		Pad     int        `json:"pad"`
		Ranges  uint32     `json:"src_range_set"`
		Pad2    int        `json:"pad2"`
	} `json:"value"`
}

// isReverse reports whether the entry serves to restore lost flows. Package maps does not list those.
func (d dumpedHostPort) isReverse() bool { return d.Key.Dir == "HOST_PORT_REVERSE" }

func (d dumpedHostPort) hostPort() maps.HostPort {
	return maps.HostPort{
		HostAddr: d.Key.Addr.addr(), HostPort: d.Key.Port, Protocol: maps.Protocol(d.Key.Protocol),
		ContainerAddr: d.Value.Addr.addr(), ContainerPort: d.Value.Port,
		Owner: loader.Owner(d.Value.Owner), Network: maps.Network(d.Value.Network), SrcRanges: maps.PrefixSet(d.Value.Ranges),
	}
}

type dumpedFlow struct {
	Key struct {
		Remote     dumpedAddr `json:"remote"`
		Local      dumpedAddr `json:"local"`
		RemotePort uint16     `json:"remote_port"`
		LocalPort  uint16     `json:"local_port"`
		Protocol   uint8      `json:"protocol"`
		Kind       string     `json:"kind"`
		Pad        int        `json:"pad"`
	} `json:"key"`
	Value struct {
		Owner      uint64     `json:"owner"`
		Addr       dumpedAddr `json:"nat_addr"`
		LastSeen   uint32     `json:"last_seen"`
		Port       uint16     `json:"nat_port"`
		State      string     `json:"state"`
		Flags      any        `json:"flags"` // a name or a number
		Uplink     int        `json:"uplink"`
		ACK        uint32     `json:"ack"`
		Expected   uint32     `json:"expected"`
		RemoteEnd  uint32     `json:"remote_end"`
		RemotePort uint16     `json:"remote_port"`
		Created    uint16     `json:"created"`
		Probe      uint8      `json:"probe"`
		Pad        [3]uint8   `json:"pad"`
	} `json:"value"`
}

var flowKinds = map[string]bpf.FlowKind{
	"FLOW_SNAT": bpf.FlowSNAT, "FLOW_DNAT": bpf.FlowDNAT, "FLOW_EGRESS": bpf.FlowEgress, "FLOW_RST_HELD": bpf.FlowRSTHeld,
}

// dumpedState returns the state of a name as in C.
func dumpedState(name string) maps.FlowState {
	for state := range maps.FlowState(bpf.FlowStates) {
		if "FLOW_"+state.String() == name {
			return state
		}
	}
	return maps.FlowState(bpf.FlowStates)
}

func (d dumpedFlow) flow() maps.Flow {
	return maps.Flow{
		Kind:     flowKinds[d.Key.Kind],
		Remote:   at(d.Key.Remote.addr(), d.Key.RemotePort),
		Local:    at(d.Key.Local.addr(), d.Key.LocalPort),
		NAT:      at(d.Value.Addr.addr(), d.Value.Port),
		Protocol: maps.Protocol(d.Key.Protocol),
		State:    dumpedState(d.Value.State),
		Owner:    loader.Owner(d.Value.Owner),
	}
}

type dumpedUplink struct {
	Key   int `json:"key"`
	Value struct {
		Addr4           dumpedAddr `json:"addr4"`
		Addr6           dumpedAddr `json:"addr6"`
		ContainerBridge int        `json:"container_bridge"`
		Bridge          int        `json:"bridge"`
	} `json:"value"`
}

func (d dumpedUplink) uplink() maps.Uplink {
	return maps.Uplink{
		IfIndex: d.Key, Addr4: d.Value.Addr4.addr(), Addr6: d.Value.Addr6.addr(),
		ContainerBridge: d.Value.ContainerBridge != 0, Bridge: d.Value.Bridge != 0,
	}
}

type dumpedDropTotal struct {
	Key    uint32 `json:"key"`
	Values []struct {
		CPU   int `json:"cpu"`
		Value struct {
			Packets uint64 `json:"packets"`
			Bytes   uint64 `json:"bytes"`
		} `json:"value"`
	} `json:"values"`
}

func (d dumpedDropTotal) dropCount() maps.DropCount {
	sum := maps.DropCount{Reason: maps.Reason(d.Key)}
	for _, perCPU := range d.Values {
		sum.Packets += perCPU.Value.Packets
		sum.Bytes += perCPU.Value.Bytes
	}
	return sum
}

type dumpedDevice struct {
	Key   int `json:"key"`
	Value struct {
		Owner     uint64     `json:"owner"`
		Network   uint32     `json:"network"`
		Container uint64     `json:"container"`
		Flags     any        `json:"flags"`
		Addr4     dumpedAddr `json:"addr4"`
		Addr6     dumpedAddr `json:"addr6"`
		Gateway4  dumpedAddr `json:"gateway4"`
		Gateway6  dumpedAddr `json:"gateway6"`
		MAC       [6]byte    `json:"mac"`
		Policy    string     `json:"ingress_policy"`
		Pad       int        `json:"pad"`
		RouteSet  uint32     `json:"route_set"`
		Pad2      int        `json:"pad2"`
	} `json:"value"`
}

func (d dumpedDevice) device() maps.Device {
	v := d.Value
	return maps.Device{
		IfIndex: d.Key, Owner: loader.Owner(v.Owner), Network: maps.Network(v.Network), Container: maps.Container(v.Container), Routes: maps.PrefixSet(v.RouteSet), MAC: v.MAC[:],
		Addr4: v.Addr4.addr(), Addr6: v.Addr6.addr(), Gateway4: v.Gateway4.addr(), Gateway6: v.Gateway6.addr(),
		AntiSpoof: v.Flags == "DEVICE_ANTI_SPOOF", IngressPolicy: map[string]maps.Policy{"POLICY_ISOLATED": maps.Isolated}[v.Policy],
	}
}

type dumpedDrop struct {
	Key struct {
		Owner  uint64 `json:"owner"`
		Reason string `json:"reason"`
		Pad    int    `json:"pad"`
	} `json:"key"`
	Value struct {
		Packets uint64 `json:"packets"`
		Bytes   uint64 `json:"bytes"`
	} `json:"value"`
}

func (d dumpedDrop) drop() maps.Drop {
	numbers := map[string]bpf.Reason{
		"REASON_ARP": bpf.ReasonARP, "REASON_MAC": bpf.ReasonMAC,
		"REASON_NO_FLOW": bpf.ReasonNoFlow, // happens on a slow machine
	}
	return maps.Drop{
		Owner:     loader.Owner(d.Key.Owner),
		DropCount: maps.DropCount{Reason: maps.Reason(numbers[d.Key.Reason]), Packets: d.Value.Packets, Bytes: d.Value.Bytes},
	}
}

type dumpedConfig struct {
	Value struct {
		Section []struct {
			Config struct {
				ABI           uint32    `json:"abi"`
				Attach        string    `json:"attach"`
				Build         uint64    `json:"build"`
				Revision      uint32    `json:"revision"`
				BackupBuckets uint32    `json:"backup_buckets"`
				Secret        [2]uint64 `json:"secret"`
				MasqPorts     [2]struct {
					First uint16 `json:"first"`
					Count uint16 `json:"count"`
				} `json:"masq_ports"`
				Timeout [bpf.FlowStates]uint32 `json:"timeout"`
			} `json:"config"`
		} `json:".rodata"`
	} `json:"value"`
}

// convert applies fn to every element.
func convert[D, T any](dumped []D, fn func(D) T) []T {
	var list []T
	for _, d := range dumped {
		list = append(list, fn(d))
	}
	return list
}

func must[T any](list []T, err error) []T {
	if err != nil {
		panic(err)
	}
	return list
}

func TestBpftoolDump(t *testing.T) {
	n := newNetworkWith(t, withKeys(`"ipMasq": true, "ingressPolicy": "isolated", "args": {"cni": {"portSources": [{"hostPort": 8080, "sources": ["192.0.2.0/24", "::/0"]}]}}`))
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	forEachProtocol(t, func(t *testing.T, f testenv.Family, protocol string) { // makes flows of every kind
		serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
		reachUntranslated(t, n.Outside, protocol, at(f.Node, 8080), web.Namespace)
		ping(t, web.Namespace, f.Outside)
	})
	s := n.senderOf(t, web, web)
	for _, frame := range s.Hostile() {
		if frame.Name == "another MAC, IPv4" || frame.Name == "ARP reply as the gateway" {
			n.wantDropped(t, web, s, []testenv.Frame{frame})
		}
	}
	n.withDatapath(t, func(datapath *loader.Datapath) {
		setDropTotals(t, datapath)
		wantSame(t, "devices", convert(dump[dumpedDevice](t, datapath, "devices"), dumpedDevice.device), must(maps.Devices(datapath)))
		wantSame(t, "drops", convert(dump[dumpedDrop](t, datapath, "drops"), dumpedDrop.drop), must(maps.Drops(datapath)))
		wantSame(t, "endpoints", convert(dump[dumpedEndpoint](t, datapath, "endpoints"), dumpedEndpoint.endpoint), must(maps.Endpoints(datapath)))
		ports := slices.DeleteFunc(dump[dumpedHostPort](t, datapath, "host_ports"), dumpedHostPort.isReverse)
		wantSame(t, "host_ports", convert(ports, dumpedHostPort.hostPort), must(maps.HostPorts(datapath)))
		wantSame(t, "flows", convert(dump[dumpedFlow](t, datapath, "flows"), dumpedFlow.flow), must(maps.Flows(datapath)))
		wantSame(t, "uplinks", convert(dump[dumpedUplink](t, datapath, "uplinks"), dumpedUplink.uplink), must(maps.Uplinks(datapath)))
		wantSame(t, "drop_totals", convert(dump[dumpedDropTotal](t, datapath, "drop_totals"), dumpedDropTotal.dropCount), must(maps.DropTotals(datapath)))

		config := dump[dumpedConfig](t, datapath, "config")
		if len(config) != 1 || len(config[0].Value.Section) != 1 {
			t.Fatalf("bpftool prints config %+v, want one entry with one section", config)
		}
		got, want := config[0].Value.Section[0].Config, datapath.Config
		attach := map[string]bpf.Attach{"ATTACH_TCX": bpf.AttachTCX, "ATTACH_CLSACT": bpf.AttachClsact}[got.Attach]
		read := bpf.HostConfig{
			Abi: got.ABI, Attach: uint32(attach), Build: got.Build, Revision: got.Revision,
			BackupBuckets: got.BackupBuckets, Secret: got.Secret, Timeout: got.Timeout,
		}
		for i, ports := range got.MasqPorts {
			read.MasqPorts[i].First, read.MasqPorts[i].Count = ports.First, ports.Count
		}
		if read != want {
			t.Errorf("map config: bpftool prints %+v, package loader reads %+v", read, want)
		}
	})
}

// setDropTotals gives each counter a value of its own, on every CPU.
func setDropTotals(t *testing.T, datapath *loader.Datapath) {
	t.Helper()
	for reason := range uint32(bpf.ReasonMax) {
		perCPU := make([]bpf.DropCount, ebpf.MustPossibleCPU())
		for cpu := range perCPU {
			perCPU[cpu] = bpf.DropCount{Packets: uint64(reason + 1), Bytes: uint64(100*reason) + uint64(cpu)}
		}
		if err := datapath.DropTotals.Put(reason, perCPU); err != nil {
			t.Fatal(err)
		}
	}
}
