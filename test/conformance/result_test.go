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
)

var update = flag.Bool("update", false, "write the results in testdata instead of comparing with them")

// TestResults compares ADD's whole output with that in testdata, for each version.
func TestResults(t *testing.T) {
	h := newHost(t)
	for _, version := range version.All.SupportedVersions() {
		for stack, conf := range map[string]object{"single": single(version), "dual": dual(version)} {
			t.Run(version+" "+stack, func(t *testing.T) {
				forgetAddresses(t)
				p := h.pod(t, "c1", conf)
				call := p.try(t, "ADD")
				wantSuccess(t, call, anything)
				compareGolden(t, fmt.Sprintf("result-%s-%s.json", version, stack), call.Stdout)
			})
		}
	}
}

// forgetAddresses makes the first address that is given out always the same.
func forgetAddresses(t *testing.T) {
	t.Helper()
	if err := os.RemoveAll(addressDir); err != nil {
		t.Fatal(err)
	}
}

// compareGolden takes stdout for equal to the file if both are one JSON document of the same value.
func compareGolden(t *testing.T, name string, stdout []byte) {
	t.Helper()
	path := filepath.Join("testdata", name)
	var got, want any
	if err := json.Unmarshal(stdout, &got); err != nil {
		t.Fatalf("stdout is not one JSON document (%v): %q", err, stdout)
	}
	if *update {
		var text bytes.Buffer
		json.Indent(&text, encode(t, got), "", "  ")
		if err := os.WriteFile(path, append(text.Bytes(), '\n'), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(golden, &want); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("result differs from %s:\n%s\nwant:\n%s", path, stdout, golden)
	}
}

// TestResultOfOldVersion: results up to 0.2.0 have room for one address of a family, which is the first. The
// container has them all.
func TestResultOfOldVersion(t *testing.T) {
	h := newHost(t)
	for _, version := range []string{"0.1.0", "0.2.0"} {
		t.Run(version, func(t *testing.T) {
			forgetAddresses(t)
			p := h.pod(t, "c1", with(single(version), "ipam.ranges", list{
				list{object{"subnet": "10.88.0.0/16"}}, list{object{"subnet": "10.89.0.0/16"}}, list{object{"subnet": "fd00:88::/64"}}, list{object{"subnet": "fd00:89::/64"}},
			}))
			if got := fmt.Sprint(addresses(p.add(t))); got != "[10.88.0.2 fd00:88::2]" {
				t.Errorf("the result has %s", got)
			}
			wantPing(t, h.Node, netip.MustParseAddr("10.88.0.2"), netip.MustParseAddr("10.89.0.2"), netip.MustParseAddr("fd00:88::2"), netip.MustParseAddr("fd00:89::2"))
		})
	}
}

// TestResultKeys holds the results to what each version's text knows, apart from what
// testdata says.
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
			golden, err := os.ReadFile(filepath.Join("testdata", "result-"+test.version+"-dual.json"))
			if err != nil {
				t.Fatal(err)
			}
			for _, word := range append(test.has, `"cniVersion": "`+test.version+`"`) {
				if !strings.Contains(string(golden), word) {
					t.Errorf("result lacks %s: %s", word, golden)
				}
			}
			for _, word := range test.lacks {
				if strings.Contains(string(golden), word) {
					t.Errorf("result has %s: %s", word, golden)
				}
			}
		})
	}
}
