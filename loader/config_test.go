package loader

import (
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestABI holds the constant against the programs' own.
func TestABI(t *testing.T) {
	spec, err := bpf.LoadDatapath()
	if err != nil {
		t.Fatal(err)
	}
	var compiled bpf.HostConfig
	if err := spec.Variables[bpf.VarConfig].Get(&compiled); err != nil || compiled.Abi != ABI {
		t.Errorf("EBPFNET_ABI: got %d (%v), want %d", compiled.Abi, err, ABI)
	}
}

func TestMasqPorts(t *testing.T) {
	for _, test := range []struct {
		name      string
		low, high int // ip_local_port_range
		want      [2][2]int
	}{
		{"the kernel's default", 32768, 60999, [2][2]int{{1024, 29999}, {61000, 65535}}},
		{"low ports only", 1024, 4999, [2][2]int{{32768, 65535}}},
		{"from the middle", 16384, 60999, [2][2]int{{1024, 16383}, {61000, 65535}}},
		{"all above", 32768, 65535, [2][2]int{{1024, 29999}}},
		{"below the node ports", 10000, 20000, [2][2]int{{1024, 9999}, {32768, 65535}}},
		{"up to a node port", 20000, 31000, [2][2]int{{1024, 19999}, {32768, 65535}}},
		{"both small, but enough", 4000, 64000, [2][2]int{{1024, 3999}, {64001, 65535}}},
		{"everything", 1024, 65535, [2][2]int{{1024, 29999}}},
		{"too much", 2000, 65000, [2][2]int{{1024, 29999}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got [2][2]int
			for i, ports := range masqPorts(test.low, test.high) {
				if ports.Count > 0 {
					got[i] = [2]int{int(ports.First), int(ports.First) + int(ports.Count) - 1}
				}
			}
			if got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestTimeouts(t *testing.T) {
	all := timeouts()
	for state, n := range all {
		if n == 0 {
			t.Errorf("state %d has no timeout", state)
		}
	}
	if got := all[bpf.FlowUDP]; got != 27 { // 30 s
		t.Errorf("UDP: got %d, want 27", got)
	}
}

func TestCacheJiffies(t *testing.T) {
	for hz, want := range map[time.Duration]uint32{100: 19, 250: 49, 300: 50, 1000: 50} {
		if got := cacheJiffies(time.Second / hz); got != want {
			t.Errorf("%d Hz: got %d jiffies, want %d", hz, got, want)
		}
	}
}

func TestSecret(t *testing.T) {
	if a, b := newSecret(), newSecret(); a == b || a[0] == a[1] {
		t.Errorf("got %x and %x", a, b)
	}
}

func TestFlowTableSize(t *testing.T) {
	for flows, want := range map[uint32]uint32{1: 1, 16: 1, 17: 2, 1000: 63} {
		if got := registry[bpf.MapFlowBuckets].size(flows); got != want {
			t.Errorf("%d flows: got %d buckets, want %d", flows, got, want)
		}
	}
}
