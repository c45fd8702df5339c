package conformance

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var update = flag.Bool("update", false, "write the results to testdata instead of comparing them")

// TestResults compares ADD's whole output with testdata, for each version.
func TestResults(t *testing.T) {
	h := newHost(t)
	for _, version := range version.All.SupportedVersions() {
		for stack, conf := range map[string]object{"single": single(version), "dual": dual(version)} {
			t.Run(version+" "+stack, func(t *testing.T) {
				removeReservations(t)
				p := h.pod(t, "c1", conf)
				call := p.try(t, "ADD")
				wantSuccess(t, call, anything)
				compareGolden(t, fmt.Sprintf("result-%s-%s.json", version, stack), call.Stdout)
			})
		}
	}
}

// removeReservations resets the order in which addresses are reserved.
func removeReservations(t *testing.T) {
	t.Helper()
	testenv.Must(t, os.RemoveAll(testenv.ReservationDir))
}

// compareGolden wants stdout to be one JSON document with the same value as the file's.
func compareGolden(t *testing.T, name string, stdout []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	var got, want any
	if err := json.Unmarshal(stdout, &got); err != nil {
		t.Fatalf("stdout: %v, want one JSON document: %q", err, stdout)
	}
	if *update {
		var text bytes.Buffer
		json.Indent(&text, encode(t, got), "", "  ")
		testenv.Must(t, os.WriteFile(path, append(text.Bytes(), '\n'), 0o644))
		return
	}
	golden := testenv.ReadFile(t, path)
	if err := json.Unmarshal(golden, &want); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("result: got\n%s\nwant %s:\n%s", stdout, path, golden)
	}
}

// TestOldResultFormat assigns several addresses per family. Results up to 0.2.0 contain the first of each; the
// container has all of them.
func TestOldResultFormat(t *testing.T) {
	h := newHost(t)
	for _, version := range []string{"0.1.0", "0.2.0"} {
		t.Run(version, func(t *testing.T) {
			removeReservations(t)
			p := h.pod(t, "c1", with(single(version), "ipam.ranges", list{
				list{object{"subnet": "10.88.0.0/16"}}, list{object{"subnet": "10.89.0.0/16"}}, list{object{"subnet": "fd00:88::/64"}}, list{object{"subnet": "fd00:89::/64"}},
			}))
			if got := fmt.Sprint(addresses(p.add(t))); got != "[10.88.0.2 fd00:88::2]" {
				t.Errorf("addresses in the result: got %s, want [10.88.0.2 fd00:88::2]", got)
			}
			wantPing(t, h.Node, netip.MustParseAddr("10.88.0.2"), netip.MustParseAddr("10.89.0.2"), netip.MustParseAddr("fd00:88::2"), netip.MustParseAddr("fd00:89::2"))
		})
	}
}

// TestResultKeys compares the keys in testdata with those of each version of the specification.
func TestResultKeys(t *testing.T) {
	for _, test := range []struct {
		version    string
		has, lacks []string
	}{
		{"0.1.0", []string{`"ip4"`, `"ip6"`}, []string{`"interfaces"`, `"ips"`}},
		{"0.2.0", []string{`"ip4"`, `"ip6"`}, []string{`"interfaces"`, `"ips"`}},
		{"0.3.0", []string{`"interfaces"`, `"version": "4"`, `"version": "6"`}, []string{`"mtu"`}},
		{"0.3.1", []string{`"interfaces"`, `"version": "4"`, `"version": "6"`}, []string{`"mtu"`}},
		{"0.4.0", []string{`"interfaces"`, `"version": "4"`, `"version": "6"`}, []string{`"mtu"`}},
		{"1.0.0", []string{`"interfaces"`, `"interface": 1`}, []string{`"mtu"`, `"version":`}},
		{"1.1.0", []string{`"interfaces"`, `"interface": 1`, `"mtu"`}, []string{`"version":`}},
	} {
		t.Run(test.version, func(t *testing.T) {
			golden := testenv.ReadFile(t, filepath.Join("testdata", "result-"+test.version+"-dual.json"))
			for _, word := range append(test.has, `"cniVersion": "`+test.version+`"`) {
				if !strings.Contains(string(golden), word) {
					t.Errorf("result: want %s in %s", word, golden)
				}
			}
			for _, word := range test.lacks {
				if strings.Contains(string(golden), word) {
					t.Errorf("result: want no %s in %s", word, golden)
				}
			}
		})
	}
}
