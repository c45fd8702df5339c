package ipam

import (
	"context"
	"encoding/json"
	"math"
	"os"
	"path/filepath"
	"testing"
)

// TestUsage counts ranges of several shapes, and the reservations of Reserve in them.
func TestUsage(t *testing.T) {
	for _, test := range []struct {
		section string
		sizes   []float64
	}{
		{`{"subnet": "10.1.0.0/24"}`, []float64{253}}, // without network, broadcast and gateway
		{`{"ranges": [[{"subnet": "10.1.0.0/24", "gateway": "10.9.0.1"}]]}`, []float64{254}},
		{`{"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.12"}]]}`, []float64{3}},
		{`{"ranges": [[{"subnet": "10.1.0.0/30"}, {"subnet": "10.2.0.0/24"}], [{"subnet": "fd00::/64"}]]}`, []float64{254, math.Exp2(64)}},
		{`{"ranges": [[{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.1", "rangeEnd": "10.1.0.9"},
			{"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.20", "rangeEnd": "10.1.0.29", "gateway": "10.1.0.1"}]]}`, []float64{18}},
	} {
		cfg, err := Parse("pods", json.RawMessage(test.section), Request{})
		if err != nil {
			t.Fatal(err)
		}
		cfg.DataDir = t.TempDir()
		check := func(want int) {
			t.Helper()
			all, err := cfg.Usage()
			if err != nil || len(all) != len(test.sizes) {
				t.Fatalf("%s: got %+v (%v), want %d sets", test.section, all, err, len(test.sizes))
			}
			for i, u := range all {
				if u.Addresses != test.sizes[i] || u.Reserved != want {
					t.Errorf("%s, set %s: got %v addresses, %d reserved; want %v, %d", test.section, u.Ranges, u.Addresses, u.Reserved, test.sizes[i], want)
				}
			}
		}
		check(0)
		pool := Open(cfg, Options{})
		for n, id := range []string{"a", "b"} {
			if _, err := pool.Reserve(context.Background(), Attachment{ContainerID: id, IfName: "eth0"}); err != nil {
				t.Fatal(err)
			}
			check(n + 1)
		}
		if err := os.WriteFile(filepath.Join(cfg.Dir(), "192.0.2.1"), nil, 0o600); err != nil { // in no range
			t.Fatal(err)
		}
		check(2)
	}
}
