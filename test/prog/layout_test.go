package prog

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestNameLengths wants names that the kernel does not truncate: bpftool shows the kernel's.
func TestNameLengths(t *testing.T) {
	const longest = 15 // BPF_OBJ_NAME_LEN, less the NUL

	spec := loadSpec(t)
	for name := range spec.Maps {
		if len(name) > longest {
			t.Errorf("map %s: name has %d characters, want at most %d", name, len(name), longest)
		}
	}
	for name := range spec.Programs {
		if len(name) > longest {
			t.Errorf("program %s: name has %d characters, want at most %d", name, len(name), longest)
		}
	}
}

// TestLayout has the bytes that an older or newer version of ebpfnet finds in pinned maps.
// A change of them must raise EBPFNET_ABI.
func TestLayout(t *testing.T) {
	addr, addr6 := v4.wire("remote"), v6.wire("remote")
	config := bpf.HostConfig{
		Abi: 3, Attach: 2, Build: 4, Revision: 5, FlowBuckets: 6, Secret: [2]uint64{7, 8},
		Timeout: [bpf.FlowStates]uint32{11: 10}, CacheJiffies: 11, SeesHooks: 12,
	}
	for i, ports := range []bpf.PortRange{{First: 1024, Count: 28976}, {First: 61000, Count: 4536}} {
		config.MasqPorts[i].First, config.MasqPorts[i].Count = ports.First, ports.Count
	}
	for _, tc := range []struct {
		m, what string
		value   any
		want    string // for little-endian machines
	}{
		{bpf.MapEndpoints, "key", addr, "00000000 00000000 0000ffff 08007109"},
		{bpf.MapEndpoints, "key", addr6, "20010db8 86dd0009 00000000 00000009"},
		{
			bpf.MapEndpoints, "value",
			bpf.Endpoint{
				Owner: 0x0102030405060708, Network: 0x11121314, Ifindex: 0x21222324, Mac: [6]byte{1, 2, 3, 4, 5, 6},
				HostMac: [6]byte{7, 8, 9, 10, 11, 12}, Gateway: addr, Flags: bpf.EndpointMasq,
				NonmasqSet: 0x31323334, Container: 0x4142434445464748, Mtu: 0x0102, FastPath: bpf.FastPathAlways, RouteSet: 0x51525354,
			},
			"0807060504030201 14131211 24232221 010203040506 0708090a0b0c 00000000 00000000 0000ffff 08007109 " +
				"01000000 34333231 0201 03 00 4847464544434241 54535251 00000000",
		},
		{bpf.MapDevices, "key", uint32(7), "07000000"},
		{
			bpf.MapDevices, "value",
			bpf.Device{
				Owner: 0x0102030405060708, Network: 0x11121314, Container: 0x2122232425262728, Flags: bpf.DeviceBridged,
				Addr4: addr, Gateway6: addr6, Mac: [6]byte{1, 2, 3, 4, 5, 6}, Policy: 0x0201,
				RouteSet: 0x51525354, LinkLocal: 0x61626364,
			},
			"0807060504030201 14131211 02000000 00000000 00000000 0000ffff 08007109 " +
				strings.Repeat("00000000", 8) + "20010db8 86dd0009 00000000 00000009 010203040506 0102 2827262524232221 54535251 64636261",
		},
		{
			bpf.MapPolicies, "value", bpf.Policy{Owner: 1, RuleSets: 0x0807060504030201, Generation: 2, Checks: bpf.PolicyCheckHost},
			"0100000000000000 0102030405060708 02000000 02000000",
		},
		{
			bpf.MapPolicyRules, "key", bpf.RuleKey{Prefixlen: 96, Set: 1, Peer: 2, Kind: bpf.PeerBlock, Protocol: 6, Port: [2]uint8{0x1f, 0x90}},
			"60000000 01000000 02000000 04 06 1f90",
		},
		{bpf.MapRuleSets, "value", bpf.RuleSet{Digest: [16]uint8{1, 15: 2}, Flags: bpf.RuleSetAudit}, "01" + strings.Repeat("00", 14) + "02 40000000"},
		{
			bpf.MapHostPorts, "key", bpf.HostPortKey{Addr: addr, Port: 8080, Protocol: 6},
			"00000000 00000000 0000ffff 08007109 901f 06 00",
		},
		{
			bpf.MapHostPorts, "key",
			bpf.HostPortKey{Addr: addr, Port: 80, Protocol: 6, Dir: bpf.HostPortReverse},
			"00000000 00000000 0000ffff 08007109 5000 06 01",
		},
		{
			bpf.MapHostPorts, "value", bpf.HostPort{Owner: 1, TargetAddr: addr, Network: 2, TargetPort: 80, SrcRangeSet: 0x01020304},
			"0100000000000000 02000000 5000 0000 00000000 00000000 0000ffff 08007109 04030201 00000000",
		},
		{
			bpf.MapFlowBuckets, "value", bpf.FlowBucket{Id: [16]uint32{0: 0x01020304, 15: 5}},
			"04030201" + strings.Repeat("00000000", 14) + "05000000 0000000000000000",
		},
		{
			bpf.MapFlowTable, "value",
			bpf.FlowEntry{
				Key: bpf.FlowKey{Remote: addr, Local: addr6, RemotePort: 80, LocalPort: 8080, Protocol: 17, Kind: bpf.FlowDNAT},
				Flow: bpf.Flow{
					Owner: 1, NatAddr: addr, LastSeen: 0x01020304, NatPort: 80, State: bpf.FlowLastACK, Flags: bpf.FlowFIN,
					Uplink: 6, Ack: 7, Expected: 8, RemoteEnd: 9, RemotePort: 0x0102, Created: 0x0304, Probe: 5, Payer: 10,
				},
			},
			"00000000 00000000 0000ffff 08007109 20010db8 86dd0009 00000000 00000009 5000 901f 11 02 0000" +
				"0100000000000000 00000000 00000000 0000ffff 08007109 04030201 5000 05 04 06000000 07000000 08000000 09000000 0201 0403 05 000000 0a00000000000000",
		},
		{bpf.MapMovedFlows, "value", bpf.Moved{Seen: 1, SeenFar: 2}, "01000000 02000000"},
		{
			bpf.MapPrefixes, "key", bpf.PrefixKey{Prefixlen: 160, Set: 0x01020304, Addr: addr},
			"a0000000 04030201 00000000 00000000 0000ffff 08007109",
		},
		{bpf.MapPrefixes, "value", addr, "00000000 00000000 0000ffff 08007109"},
		{
			bpf.MapFragments, "key", bpf.FragmentKey{Src: addr, Dst: addr6, Id: 0x01020304, Protocol: 17},
			"00000000 00000000 0000ffff 08007109 20010db8 86dd0009 00000000 00000009 04030201 11 000000",
		},
		{
			bpf.MapFragments, "value", bpf.Fragment{Sport: 80, Dport: 8080, EchoReply: 1, HasPorts: 1, Queued: 1, LastSeen: 0x01020304},
			"5000 901f 01 01 01 00 04030201",
		},
		{bpf.MapUplinks, "key", uint32(7), "07000000"},
		{
			bpf.MapUplinks, "value", bpf.Uplink{Addr4: addr, Addr6: addr6, ContainerBridge: 1, Bridge: 1},
			"00000000 00000000 0000ffff 08007109 20010db8 86dd0009 00000000 00000009 01000000 01000000",
		},
		{
			bpf.MapNodes, "key", bpf.PrefixKey{Prefixlen: 152, Addr: addr},
			"98000000 00000000 00000000 00000000 0000ffff 08007109",
		},
		{
			bpf.MapNodes, "value", bpf.Node{Remote: addr, Mtu: 0x01020304, Mode: bpf.NodeDirect},
			"00000000 00000000 0000ffff 08007109 04030201 02 000000",
		},
		{
			bpf.MapCluster, "value", bpf.Cluster{
				Nodes: 1, Tunnel: 2, Vni: 0x010203, Port: 4789, Addr4: addr, Addr6: addr6,
				Containers4: bpf.Prefix{Addr: addr, Mask: bpf.Addr{Bytes: [16]byte{0xff}}},
				Containers6: bpf.Prefix{Addr: addr6, Mask: bpf.Addr{Bytes: [16]byte{0xfe}}},
			},
			"01000000 02000000 03020100 b512 0000 00000000 00000000 0000ffff 08007109 20010db8 86dd0009 00000000 00000009 " +
				"00000000 00000000 0000ffff 08007109 ff000000 00000000 00000000 00000000 " +
				"20010db8 86dd0009 00000000 00000009 fe000000 00000000 00000000 00000000",
		},
		{bpf.MapDropTotals, "key", uint32(bpf.ReasonRewrite), "05000000"},
		{bpf.MapDropTotals, "value", bpf.DropCount{Packets: 1, Bytes: 2}, "0100000000000000 0200000000000000"},
		{
			bpf.MapDrops, "key", bpf.DropKey{Owner: 0x0102030405060708, Reason: bpf.ReasonMAC},
			"0807060504030201 07000000 00000000",
		},
		{bpf.MapDrops, "value", bpf.DropCount{Packets: 1, Bytes: 2}, "0100000000000000 0200000000000000"},
		{
			bpf.MapDropReader, "value", bpf.DropReader{Until: 0x0102030405060708, Reasons: 9, Owner: [8]uint64{7: 10}, Limit: 11, Pid: 12},
			"0807060504030201 0900000000000000" + strings.Repeat("00000000", 14) + "0a00000000000000 0b000000 0c000000",
		},
		{
			bpf.MapDropLimits, "value", bpf.DropLimit{Began: 0x0102030405060708, Events: 9, LeftOut: 10, Ours: 11},
			"0807060504030201 0900000000000000 0a00000000000000 0b00000000000000",
		},
		{
			".rodata", "value", config,
			"03000000 02000000 0400000000000000 05000000 06000000 0700000000000000 0800000000000000 0004 3071 48ee b811" + strings.Repeat(" 00000000", 11) + " 0a000000 0b000000 0c000000",
		},
	} {
		t.Run(tc.m+" "+tc.what, func(t *testing.T) {
			var got bytes.Buffer
			testenv.Must(t, binary.Write(&got, binary.LittleEndian, tc.value))
			want, err := hex.DecodeString(strings.ReplaceAll(tc.want, " ", ""))
			testenv.Must(t, err)
			if !bytes.Equal(got.Bytes(), want) {
				t.Errorf("got  %x\nwant %x", got.Bytes(), want)
			}
			m := mapSpec(t, tc.m)
			size := m.KeySize
			if tc.what == "value" {
				size = m.ValueSize
			}
			if int(size) != len(want) {
				t.Errorf("%s has %d bytes in the map, %d in Go", tc.what, size, len(want))
			}
		})
	}
}

// TestOffsets wants no implicit padding in keys and values: C would leave it undefined, and
// the Go types encode none.
func TestOffsets(t *testing.T) {
	for name, m := range loadSpec(t).Maps {
		if name == "pkt_scratch" {
			continue // scratch: nothing in it outlives the packet
		}
		for what, typ := range map[string]btf.Type{"key": m.Key, "value": m.Value} {
			checkNoHoles(t, name+" "+what, typ)
		}
	}
}

func checkNoHoles(t *testing.T, name string, typ btf.Type) {
	t.Helper()
	s, ok := btf.UnderlyingType(typ).(*btf.Struct)
	if !ok {
		return
	}
	end := btf.Bits(0)
	for _, member := range s.Members {
		size, err := btf.Sizeof(member.Type)
		testenv.Must(t, err)
		if member.Offset != end {
			t.Errorf("%s: padding before %s", name, member.Name)
		}
		end = member.Offset + btf.Bits(size*8)
		checkNoHoles(t, name+" "+member.Name, member.Type)
	}
	if end != btf.Bits(s.Size*8) {
		t.Errorf("%s: padding at the end", name)
	}
}

func TestReasonStrings(t *testing.T) {
	if len(reasons) != int(bpf.ReasonMax) {
		t.Errorf("tables have %d reasons, the datapath has %d", len(reasons), bpf.ReasonMax)
	}
	seen := map[string]bool{}
	for reason := range bpf.ReasonMax {
		text := maps.Reason(reason).String()
		if text == "" || strings.HasPrefix(text, "reason ") || seen[text] {
			t.Errorf("reason %d is %q", reason, text)
		}
		seen[text] = true
		if isDrop := maps.Reason(reason).IsDrop(); isDrop == strings.HasPrefix(text, "not dropped: ") {
			t.Errorf("reason %q is a drop: %v", text, isDrop)
		}
	}
	if got, want := maps.Reason(bpf.ReasonMax).String(), fmt.Sprintf("reason %d", bpf.ReasonMax); got != want {
		t.Errorf("unknown reason is %q, want %s", got, want)
	}
}

func loadSpec(t *testing.T) *ebpf.CollectionSpec {
	t.Helper()
	spec, err := newSpec()
	testenv.Must(t, err)
	return spec
}

func mapSpec(t *testing.T, name string) *ebpf.MapSpec {
	t.Helper()
	m := loadSpec(t).Maps[name]
	if m == nil {
		t.Fatalf("no map %s", name)
	}
	return m
}
