package conformance

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"github.com/containernetworking/cni/pkg/version"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestHostLocal passes the same configurations to the reference plugin, to ebpfnet-ipam and to ebpfnet. Their
// addresses, gateways, routes, DNS and files must be equal.
func TestHostLocal(t *testing.T) {
	h := newHost(t)
	reference := testenv.Build(t, "github.com/containernetworking/plugins/plugins/ipam/host-local")
	own := testenv.Build(t, "./cmd/ebpfnet-ipam")
	resolvConf := filepath.Join(t.TempDir(), "resolv.conf")
	testenv.Must(t, os.WriteFile(resolvConf, []byte("domain a.test\nnameserver 192.0.2.53\nsearch b.test c.test\noptions ndots:2\n"), 0o644))
	type test struct {
		name, args string
		conf       object
	}
	tests := []test{
		{"legacy keys", "", with(single("1.1.0"), "ipam", object{"type": "host-local", "subnet": "10.88.0.0/24", "rangeStart": "10.88.0.20", "rangeEnd": "10.88.0.30", "gateway": "10.88.0.254"})},
		{"legacy keys and ranges", "", with(single("1.1.0"), "ipam.subnet", "10.87.0.0/24")},
		{"gateway", "", with(single("1.1.0"), "ipam.ranges", list{list{object{"subnet": "10.88.0.0/24", "gateway": "10.88.0.2"}}})},
		{"alternatives", "", with(single("1.1.0"), "ipam.ranges", list{list{object{"subnet": "10.88.0.0/30", "rangeStart": "10.88.0.2"}, object{"subnet": "10.99.0.0/24"}}})},
		{"IPv6 alone", "", with(with(single("1.1.0"), "ipam.ranges", list{list{object{"subnet": "fd00:88::/64"}}}), "ipam.routes", list{object{"dst": "::/0"}})},
		{"routes", "", with(dual("1.1.0"), "ipam.routes", list{object{"dst": "0.0.0.0/0", "gw": "10.88.0.1", "mtu": 1300, "priority": 7}, object{"dst": "::/0", "table": 100, "scope": 0}})},
		{"resolvConf", "", with(single("1.1.0"), "ipam.resolvConf", resolvConf)},
		{"CNI_ARGS", "IP=10.88.3.3", single("1.1.0")},
		{"Kubernetes", "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_INFRA_CONTAINER_ID=c1", dual("1.1.0")},
		{"args", "", with(dual("1.1.0"), "args.cni.ips", list{"10.88.4.4"})},
		{"ips", "", with(dual("1.1.0"), "runtimeConfig.ips", list{"10.88.5.5", "fd00:88::5"})},
		{"ipRanges", "", with(single("1.1.0"), "runtimeConfig.ipRanges", list{list{object{"subnet": "10.86.0.0/16"}}})},
	}
	for _, version := range version.All.SupportedVersions() {
		tests = append(tests, test{"version " + version, "", dual(version)})
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var outputs []object
			var files []testenv.Snapshot
			for _, plugin := range []string{reference, own, h.plugin} {
				removeReservations(t)
				p := h.pod(t, "c1", test.conf)
				p.args = test.args
				env := p.env("ADD")
				call, err := h.Node.Invoke(testenv.Context(t), plugin, env, encode(t, test.conf))
				if err != nil || call.Exit != 0 {
					t.Fatalf("%s: %v, %v", filepath.Base(plugin), err, call.Err())
				}
				outputs = append(outputs, addressPart(t, call.Stdout))
				reservations, err := testenv.Reservations()
				testenv.Must(t, err)
				files = append(files, reservations)
				env["CNI_COMMAND"] = "DEL"
				if call, err = h.Node.Invoke(testenv.Context(t), plugin, env, encode(t, test.conf)); err != nil || call.Exit != 0 {
					t.Fatalf("%s: DEL: %v, %v", filepath.Base(plugin), err, call.Err())
				}
			}
			for i, name := range []string{1: "ebpfnet-ipam", 2: "ebpfnet"} {
				if i > 0 && !reflect.DeepEqual(outputs[i], outputs[0]) {
					t.Errorf("%s: got %s, want host-local's %s", name, encode(t, outputs[i]), encode(t, outputs[0]))
				}
				if added, removed := files[0].Compare(files[i]); len(added)+len(removed) > 0 {
					t.Errorf("files of %s: got %q instead of host-local's %q", name, added, removed)
				}
			}
		})
	}
}

// addressPart returns a result without interfaces and references to them.
func addressPart(t *testing.T, stdout []byte) object {
	t.Helper()
	var result object
	if err := json.Unmarshal(stdout, &result); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	delete(result, "interfaces")
	ips, _ := result["ips"].(list)
	for _, ip := range ips {
		delete(ip.(object), "interface")
	}
	return result
}
