package conformance

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestForeignConfigs connects a container with the first plugin of lists that others have written, after a change of
// its type alone. The container must reach the outside, and the log names the keys that had no effect.
func TestForeignConfigs(t *testing.T) {
	h := newHost(t)
	for _, test := range []struct {
		name, conf    string
		ignored, left []string
	}{
		{"bridge of cni.dev", `{
			"cniVersion": "0.3.1", "name": "mynet", "type": "bridge", "bridge": "mynet0", "isDefaultGateway": true,
			"forceAddress": false, "ipMasq": true, "hairpinMode": true,
			"ipam": {"type": "host-local", "subnet": "10.10.0.0/16"}}`,
			[]string{"bridge: ", "isDefaultGateway: ", "forceAddress: ", "hairpinMode: "}, nil},
		{"bridge of podman", `{
			"cniVersion": "0.4.0", "name": "podman", "type": "bridge", "bridge": "cni-podman0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
			"args": {"podman_labels": {"a": "b"}},
			"ipam": {"type": "host-local", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "10.88.0.0/16", "gateway": "10.88.0.1"}]]},
			"capabilities": {"ips": true}}`,
			[]string{"bridge: ", "isGateway: ", "hairpinMode: "}, nil},
		{"bridge of Debian's podman", `{
			"cniVersion": "0.4.0", "name": "podman", "type": "bridge", "Documentation": "/usr/share/doc/main_bridge.md", "bridge": "cni-podman0",
			"isGateway": true, "ipMasq": true,
			"ipam": {"type": "host-local", "Documentation": "/usr/share/doc/ipam.md", "routes": [{"dst": "0.0.0.0/0"}],
				"ranges": [[{"subnet": "10.88.0.0/16", "gateway": "10.88.0.1"}]]}}`,
			[]string{"bridge: ", "isGateway: "}, []string{"Documentation", "ipam.Documentation"}},
		{"bridge of containerd", `{
			"cniVersion": "1.0.0", "name": "containerd-net", "type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "promiscMode": true,
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "2001:db8:4860::/64"}]],
				"routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}`,
			[]string{"bridge: ", "isGateway: ", "promiscMode: "}, nil},
		{"bridge of both families by default", `{
			"cniVersion": "1.0.0", "name": "six", "type": "bridge", "isDefaultGateway": true, "ipMasq": true, "macspoofchk": true,
			"vlan": 0, "portIsolation": false,
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]], "routes": [{"dst": "0.0.0.0/0"}]}}`,
			[]string{"isDefaultGateway: ", "macspoofchk: "}, nil},
		{"ptp of Debian's podman", `{
			"cniVersion": "0.4.0", "name": "podman", "type": "ptp", "Documentation": "/usr/share/doc/main_ptp.md", "ipMasq": true,
			"ipam": {"type": "host-local", "subnet": "172.16.16.0/24", "routes": [{"dst": "0.0.0.0/0"}]}}`,
			nil, []string{"Documentation"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var conf object
			testenv.Must(t, json.Unmarshal([]byte(test.conf), &conf))
			conf["type"] = "ebpfnet"
			file := filepath.Join(t.TempDir(), "log")
			p := h.pod(t, "c1", with(conf, "logFile", file))
			result := p.add(t)
			to := []netip.Addr{testenv.OutsideAddr4}
			if len(result.IPs) > 1 {
				to = append(to, testenv.OutsideAddr6)
			}
			wantPing(t, p.Namespace, to...)
			if conf["cniVersion"] != "0.3.1" { // which has no CHECK
				wantSuccess(t, p.try(t, "CHECK"), "")
			}
			p.del(t)
			text := testenv.ReadFile(t, file)
			wantKeys(t, string(text), "level=WARN", test.ignored)
			wantKeys(t, string(text), "level=INFO msg=\"left", test.left)
		})
	}
	t.Run("keys of an IPAM plugin", h.testDelegatedKeys)
}

// wantKeys wants one line of the log that names all of the keys, or none where there are no keys.
func wantKeys(t *testing.T, log, start string, keys []string) {
	t.Helper()
	lines := slices.DeleteFunc(strings.Split(log, "\n"), func(line string) bool { return !strings.Contains(line, start) })
	if len(lines) != min(len(keys), 1) {
		t.Errorf("log: got %d lines with %s, want one for %q:\n%s", len(lines), start, keys, log)
		return
	}
	for _, key := range keys {
		if !strings.Contains(lines[0], key) {
			t.Errorf("log: got %s, want %q", lines[0], key)
		}
	}
}

// testDelegatedKeys runs the verbs with the keys that an IPAM plugin has at the top level.
func (h *host) testDelegatedKeys(t *testing.T) {
	conf := with(single("1.1.0"), "ipam", object{"type": "ebpfnet-ipam", "subnet": "10.88.0.0/16", "vendor": 1})
	for _, key := range []string{"datastore_type", "log_level", "log_file_path", "nodename", "kubernetes", "mtu_file"} {
		conf[key] = object{"a": "b"}
	}
	h.path = filepath.Dir(testenv.Build(t, "./cmd/ebpfnet-ipam"))
	p := h.pod(t, "c1", conf)
	p.add(t)
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantSuccess(t, p.try(t, "STATUS"), "")
	p.del(t)
	p.conf = with(conf, "ipam.gatway", "10.88.0.1") // in its section, where ours is strict, too
	wantError(t, p.try(t, "ADD"), codeUnsupported, "ipam.gatway", "did you mean gateway?")
}

// hostile has what moves cursors, starts lines and hides text.
const hostile = "a\x1b]0;owned\a\x1b[2J\nb\r\x7f\u009b31m\u202ec"

// TestHostileValues calls ADD with long and with hostile values in each place. Errors and logs must be short, printable
// lines.
func TestHostileValues(t *testing.T) {
	h := newHost(t)
	values := map[string]any{
		"long": strings.Repeat("A", 1_600_000), "long words": strings.Repeat("A ", 50_000), "hostile": hostile,
		"list": list{hostile}, "object": object{hostile: hostile, strings.Repeat("A ", 1000): 1},
	}
	for _, path := range []string{
		"name", "cniVersion", "ipMasq", "fastPath", "uplinks", "ipam", "ipam.type", "ipam.routes", "ipam.ranges", "ipam.dataDir", "dns", "args.cni",
		"args.cni.ips", "runtimeConfig.mac", "runtimeConfig.portMappings", "prevResult", "nonMasqueradeCIDRs", "sysctl", "vlan", "ipMask", "unknown",
	} {
		for kind, value := range values {
			t.Run(path+" "+kind, func(t *testing.T) {
				file := filepath.Join(t.TempDir(), "log")
				env := map[string]string{"CNI_COMMAND": "ADD", "CNI_CONTAINERID": "c1", "CNI_NETNS": "/nowhere" + hostile, "CNI_IFNAME": "eth0", "CNI_PATH": h.path}
				call := h.call(t, env, encode(t, with(with(single("1.1.0"), "logFile", file), path, value)))
				var failure struct{ CNIVersion, Msg, Details string }
				if err := json.Unmarshal(call.Stdout, &failure); call.Exit == 0 || err != nil || failure.Msg == "" {
					t.Fatalf("got exit code %d, %v: %.500s", call.Exit, err, call.Stdout)
				}
				log, err := os.ReadFile(file)
				if err != nil && !os.IsNotExist(err) {
					t.Fatal(err)
				}
				for what, line := range map[string]string{"cniVersion": failure.CNIVersion, "msg": failure.Msg, "details": failure.Details} {
					wantShown(t, what, line)
				}
				for what, text := range map[string]string{"stderr": string(call.Stderr), "log": string(log)} {
					wantLinesShown(t, what, text)
				}
			})
		}
	}
}

// wantLinesShown wants printable lines, none of them long.
func wantLinesShown(t *testing.T, what, text string) {
	t.Helper()
	for line := range strings.SplitSeq(strings.TrimSuffix(text, "\n"), "\n") {
		wantShown(t, what, line)
	}
}

// wantShown wants a printable line that is not long. Only what the CNI library says about values of many words has
// more than a thousand characters.
func wantShown(t *testing.T, what, line string) {
	t.Helper()
	longest := 1000
	if strings.Contains(t.Name(), "_long_words") {
		longest = 2500
	}
	if len(line) > longest {
		t.Errorf("%s: got a line of %d bytes: %.300q", what, len(line), line)
	}
	for _, r := range line {
		if !strconv.IsPrint(r) {
			t.Errorf("%s: got %q in %.300q", what, r, line)
		}
	}
}

// TestCtlHostileNames lists a container of a runtime with hostile names, on a host whose uplink has one. Each stays within its line.
func TestCtlHostileNames(t *testing.T) {
	h := newHost(t)
	conf := with(single("1.1.0"), "args.cni.labels", list{object{"key": "k" + hostile, "value": "v" + hostile}})
	conf = with(with(conf, "runtimeConfig.aliases", list{hostile, "web\n  policy      isolated"}), "runtimeConfig.cgroupPath", "/"+hostile)
	h.addUplink(t, "u\x1b[2J\x7f")
	p := h.pod(t, "c1", conf)
	p.add(t)
	for _, args := range [][]string{
		{"attachments"}, {"attachments", "c1"}, {"attachments", "-o", "wide"}, {"flows"}, {"ports"}, {"top", "--interval", "100ms"}, {"doctor"}, {"attachments", hostile}, {"ports", hostile}, {"attachments", "-o", "json"}, {"set", "pods/c1", "ingressPolicy=open"}, {"status"}, {"status", "-o", "json"}, {"metrics"}, {"metrics", "--containers"},
		{"metrics", "--listen", hostile}, {"metrics", "--textfile", "/missing/" + hostile + ".prom"}, {"bugreport", "/missing/" + hostile}, {"unload"}, {"set", "pods/" + hostile, "antiSpoof=true"}, {hostile}, {"status", "-o", hostile}, {"status", hostile}, {"set", "pods", hostile + "=1"},
	} {
		exit, stdout, stderr := h.ctl(t, args...)
		wantLinesShown(t, fmt.Sprintf("stdout of %q", args), stdout)
		wantLinesShown(t, fmt.Sprintf("stderr of %q", args), stderr)
		if isGood := exit == 0 || exit == 3; isGood == (stdout == "") || strings.Count(stderr, "\n") > 1 {
			t.Errorf("%q: got exit code %d, %s%s", args, exit, stdout, stderr)
		}
	}
	_, text, _ := h.ctl(t, "attachments", "c1")
	if !strings.Contains(text, `a\x1b]0;owned`) && !strings.Contains(text, `a\e]0;owned`) {
		t.Errorf("got no label: %s", text)
	}
	_, text, _ = h.ctl(t, "attachments", "-o", "json")
	var got []struct{ Aliases []string }
	if err := json.Unmarshal([]byte(text), &got); err != nil || len(got) != 1 || got[0].Aliases[0] != hostile {
		t.Errorf("got %+v, %v; want the alias %q", got, err, hostile)
	}
	p.del(t)
}
