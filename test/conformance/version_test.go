package conformance

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/version"
)

// TestVersion asks as podman does, which has no namespace to name, and as a shell does.
func TestVersion(t *testing.T) {
	h := newHost(t)
	before := h.state(t)
	for _, test := range []struct {
		name, stdin string
		env         map[string]string
	}{
		{"podman", `{"cniVersion": "1.0.0"}`, map[string]string{"CNI_COMMAND": "VERSION", "CNI_NETNS": "dummy", "CNI_IFNAME": "dummy", "CNI_PATH": "dummy"}},
		{"nothing on stdin", "", map[string]string{"CNI_COMMAND": "VERSION"}},
		{"version of the future on stdin", `{"cniVersion": "9.0.0"}`, map[string]string{"CNI_COMMAND": "VERSION"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			call := h.call(t, test.env, []byte(test.stdin))
			wantSuccess(t, call, anything)
			var answer struct {
				CNIVersion        string
				SupportedVersions []string
			}
			if err := json.Unmarshal(call.Stdout, &answer); err != nil {
				t.Fatalf("%v: %s", err, call.Stdout)
			}
			if !slices.Equal(answer.SupportedVersions, version.All.SupportedVersions()) || answer.CNIVersion == "" {
				t.Errorf("answer is %s", call.Stdout)
			}
		})
	}
	h.wantState(t, before)
}

// TestNoCommand is a person who runs the plugin by hand.
func TestNoCommand(t *testing.T) {
	h := newHost(t)
	call := h.call(t, nil, nil)
	if len(call.Stdout) != 0 || !strings.Contains(string(call.Stderr), `"type": "ebpfnet"`) {
		t.Errorf("stdout %q, stderr %q, want the latter to explain", call.Stdout, call.Stderr)
	}
}
