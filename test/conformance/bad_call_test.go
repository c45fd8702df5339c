package conformance

import (
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestBadEnvironment calls verbs with invalid environment variables.
func TestBadEnvironment(t *testing.T) {
	const missing = ""
	h := newLoadedHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	before := h.snapshot(t, p.Namespace)
	for _, test := range []struct {
		verb, variable, value string
		code                  uint
		words                 []string
	}{
		{"ADD", "CNI_CONTAINERID", missing, codeInvalidEnv, []string{"CNI_CONTAINERID"}},
		{"ADD", "CNI_NETNS", missing, codeInvalidEnv, []string{"CNI_NETNS"}},
		{"ADD", "CNI_IFNAME", missing, codeInvalidEnv, []string{"CNI_IFNAME"}},
		{"ADD", "CNI_PATH", missing, codeInvalidEnv, []string{"CNI_PATH"}},
		{"DEL", "CNI_CONTAINERID", missing, codeInvalidEnv, []string{"CNI_CONTAINERID"}},
		{"DEL", "CNI_IFNAME", missing, codeInvalidEnv, []string{"CNI_IFNAME"}},
		{"CHECK", "CNI_NETNS", missing, codeInvalidEnv, []string{"CNI_NETNS"}},
		{"GC", "CNI_PATH", missing, codeInvalidEnv, []string{"CNI_PATH"}},
		{"ADD", "CNI_COMMAND", "UPDATE", codeInvalidEnv, []string{"CNI_COMMAND", "UPDATE"}},
		{"ADD", "CNI_COMMAND", "add", codeInvalidEnv, []string{"CNI_COMMAND", "add"}},

		// The CNI library words these errors.
		{"ADD", "CNI_CONTAINERID", "../c1", codeInvalidEnv, []string{"containerID", "../c1"}},
		{"ADD", "CNI_CONTAINERID", "c 1", codeInvalidEnv, []string{"containerID", "c 1"}},
		{"ADD", "CNI_IFNAME", "a23456789012345x", codeInvalidEnv, []string{"interface name", "long"}},
		{"ADD", "CNI_IFNAME", "eth/0", codeInvalidEnv, []string{"interface name"}},
		{"ADD", "CNI_IFNAME", "eth 0", codeInvalidEnv, []string{"interface name"}},
		{"ADD", "CNI_IFNAME", "eth:0", codeInvalidEnv, []string{"interface name"}},
		{"ADD", "CNI_IFNAME", "..", codeInvalidEnv, []string{"interface name", ".."}},
		{"ADD", "CNI_IFNAME", "lo", codeInvalidEnv, []string{"CNI_IFNAME", "lo"}},
		{"ADD", "CNI_IFNAME", "eth%d", codeInvalidEnv, []string{"CNI_IFNAME", "eth%d"}},

		{"ADD", "CNI_NETNS", "/run/netns/absent", codeInvalidNetNS, []string{"CNI_NETNS", "/run/netns/absent"}},
		{"ADD", "CNI_NETNS", "/proc/self/stat", codeInvalidNetNS, []string{"CNI_NETNS", "/proc/self/stat"}},
		{"ADD", "CNI_NETNS", "/proc/self/ns/mnt", codeInvalidNetNS, []string{"CNI_NETNS", "/proc/self/ns/mnt"}},
		{"ADD", "CNI_NETNS", "/proc", codeInvalidNetNS, []string{"CNI_NETNS", "/proc"}},
		{"ADD", "CNI_NETNS", "/proc/self/ns/net", codeInvalidNetNS, []string{"CNI_NETNS", "/proc/self/ns/net"}},
		{"ADD", "CNI_NETNS", h.Node.Path, codeInvalidNetNS, []string{"CNI_NETNS", h.Node.Path}},

		{"ADD", "CNI_ARGS", "FOO=bar", codeInvalidEnv, []string{"CNI_ARGS", "FOO=bar"}},
		{"ADD", "CNI_ARGS", "IgnoreUnknown=0;FOO=bar", codeInvalidEnv, []string{"CNI_ARGS", "FOO=bar"}},
		{"ADD", "CNI_ARGS", "IP", codeInvalidEnv, []string{"CNI_ARGS", "IP"}},
		{"ADD", "CNI_ARGS", "IP=ten", codeInvalidEnv, []string{"CNI_ARGS", "ten"}},
		{"ADD", "CNI_ARGS", "IP=10.99.0.1", codeInvalidEnv, []string{"CNI_ARGS", "10.99.0.1"}},
		{"ADD", "CNI_ARGS", "MAC=02:00", codeInvalidEnv, []string{"CNI_ARGS", "02:00"}},
		{"ADD", "CNI_LOG_FILE", "ebpfnet.log", codeInvalidEnv, []string{"CNI_LOG_FILE", "ebpfnet.log", "absolute"}},
		{"ADD", "CNI_LOG_FILE", "/dev/null", codeInvalidEnv, []string{"CNI_LOG_FILE", "/dev/null", "regular file"}},
	} {
		t.Run(test.verb+" "+test.variable+"="+test.value, func(t *testing.T) {
			env := p.env(test.verb)
			env[test.variable] = test.value
			wantError(t, h.call(t, env, encode(t, p.conf)), test.code, test.words...)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestBadInput passes truncated configurations, and JSON that is no object.
func TestBadInput(t *testing.T) {
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	before := h.snapshot(t, p.Namespace)
	whole := string(encode(t, p.conf))
	inputs := []string{"", " ", "null", "[]", `"ebpfnet"`, "1", whole + "}", whole + whole, strings.ReplaceAll(whole, `"`, "'"), "\x00" + whole}
	for length := 1; length < len(whole); length += 13 {
		inputs = append(inputs, whole[:length])
	}
	for _, verb := range []string{"ADD", "DEL", "CHECK", "GC", "STATUS"} {
		for i, input := range inputs {
			t.Run(fmt.Sprint(verb, " ", i), func(t *testing.T) {
				code := codeDecoding
				if input == "null" {
					code = codeInvalidConfig // an object without a name
				}
				wantError(t, h.call(t, p.env(verb), []byte(input)), code)
			})
		}
	}
	h.wantUnchanged(t, before, p.Namespace)
}

// TestErrorVersion checks that errors have the configuration's cniVersion, and the latest one where the CNI library
// refuses a call before a verb has it.
func TestErrorVersion(t *testing.T) {
	h := newHost(t)
	want := func(t *testing.T, call *testenv.Call, version string) {
		t.Helper()
		if want := fmt.Sprintf("%q: %q", "cniVersion", version); !strings.Contains(string(call.Stdout), want) {
			t.Errorf("error: got %s, want it to contain %s", call.Stdout, want)
		}
	}
	for _, version := range version.All.SupportedVersions() {
		t.Run(version, func(t *testing.T) {
			p := h.pod(t, "c1", with(dual(version), "mtu", -1))
			call := p.try(t, "ADD")
			wantError(t, call, codeInvalidConfig, "mtu")
			want(t, call, version)
		})
	}
	p := h.pod(t, "c1", dual("1.1.0"))
	unknown := p.env("ADD")
	unknown["CNI_COMMAND"] = "UPDATE"
	for name, call := range map[string]*testenv.Call{
		"unknown verb":    h.call(t, unknown, p.stdin(t)),
		"unknown version": h.call(t, p.env("ADD"), encode(t, with(p.conf, "cniVersion", "9.9.9"))),
		"no JSON":         h.call(t, p.env("ADD"), []byte("{")),
	} {
		t.Run(name, func(t *testing.T) { want(t, call, version.Current()) })
	}
}
