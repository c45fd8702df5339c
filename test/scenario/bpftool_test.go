package scenario

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

func must[T any](list []T, err error) []T {
	if err != nil {
		panic(err)
	}
	return list
}

// The pinned maps have BTF: bpftool prints fields by name, and enumerations by the names of their values. Where each
// field is, TestLayout of package prog compares.
func TestBpftoolDump(t *testing.T) {
	requireTool(t, "bpftool", "bpftool")
	n := newEstablishedNetwork(t)
	web := n.AddPod(t, "web", mapBoth(8080, 80))
	f := testenv.IPv4
	serve(t, web.Namespace, "tcp", at(f.Pod(web), 80))
	reachUntranslated(t, n.Outside, "tcp", at(f.Node, 8080), web.Namespace)
	n.wantDropped(t, web, web.Sender(t, web), framesNamed(web.Sender(t, web).Hostile(), "another MAC, IPv4"))
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for pin, field := range map[string]struct {
			path []string
			want string
		}{
			"devices":     {[]string{"value", "flags"}, `"DEVICE_ANTI_SPOOF"`},
			"drops":       {[]string{"key", "reason"}, `"REASON_MAC"`},
			"drop_totals": {[]string{"values"}, ""},
			"endpoints":   {[]string{"value", "fast_path"}, `"FAST_PATH_ESTABLISHED"`},
			"host_ports":  {[]string{"key", "dir"}, ""},
			"flow_table":  {[]string{"value", "key", "kind"}, `"FLOW_DNAT"`},
			"uplinks":     {[]string{"value", "addr4", "bytes"}, ""},
			"config":      {[]string{"value", ".rodata"}, ""},
		} {
			wantField(t, filepath.Join(datapath.Dir(), "maps", pin), field.path, field.want)
		}
	})
}

// wantField checks that bpftool prints each of a map's entries with the field, and one of them with the value; "": any.
func wantField(t *testing.T, pin string, path []string, want string) {
	t.Helper()
	output, err := exec.CommandContext(testenv.Context(t), "bpftool", "-j", "map", "dump", "pinned", pin).Output()
	if err != nil {
		t.Fatalf("bpftool map dump pinned %s: %v: %s", pin, err, output)
	}
	var entries []struct {
		Formatted json.RawMessage `json:"formatted"` // absent where the map has no BTF
	}
	if err := json.Unmarshal(output, &entries); err != nil {
		t.Fatalf("decode bpftool's dump of %s: %v: %s", pin, err, output)
	}
	found := false
	for _, entry := range entries {
		value := entry.Formatted
		for _, name := range path {
			var fields map[string]json.RawMessage
			if err := json.Unmarshal(value, &fields); err != nil || fields[name] == nil {
				t.Fatalf("%s: no field %v in %s (%v)", pin, path, entry.Formatted, err)
			}
			value = fields[name]
		}
		found = found || want == "" || string(value) == want
	}
	if !found {
		t.Errorf("%s: no entry of %s has %s in %v", pin, output, want, path)
	}
}
