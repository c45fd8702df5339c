package migrate

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/runtimes"
)

const subnetEnv = "FLANNEL_NETWORK=10.244.0.0/16\nFLANNEL_SUBNET=10.244.1.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"

// translated translates plugins on a host whose flanneld has written a file.
func translated(t *testing.T, plugins, env string) (*translation, error) {
	t.Helper()
	list, err := libcni.NetworkConfFromBytes([]byte(`{"cniVersion": "0.3.1", "name": "pods", "plugins": [` + plugins + `]}`))
	if err != nil {
		t.Fatal(err)
	}
	h := &host{Options: Options{Options: runtimes.Options{Root: t.TempDir()}}}
	file := filepath.Join(h.Root, "run/flannel/subnet.env")
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(env), 0o644); err != nil {
		t.Fatal(err)
	}
	return h.translate(list)
}

// TestTranslate translates what users have.
func TestTranslate(t *testing.T) {
	const ranges = `"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16", "gateway": "10.88.0.1"}]], "routes": [{"dst": "0.0.0.0/0"}]}`

	for name, test := range map[string]struct{ old, want string }{
		"podman": {
			`{"type": "bridge", "bridge": "cni-podman0", "isGateway": true, "ipMasq": true, "hairpinMode": true, ` + ranges + `},
			{"type": "portmap", "capabilities": {"portMappings": true}}, {"type": "firewall"}, {"type": "tuning"}`,
			`{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true, "ips": true}, ` + ranges + `}`},
		"nerdctl": {
			`{"type": "bridge", "bridge": "nerdctl0", "isGateway": true, "ipMasq": true, "hairpinMode": true, ` + ranges + `},
			{"type": "portmap", "capabilities": {"portMappings": true}}, {"type": "firewall", "ingressPolicy": "same-bridge"}, {"type": "tuning"}`,
			`{"type": "ebpfnet", "ipMasq": true, "ingressPolicy": "same-network", "capabilities": {"portMappings": true, "ips": true}, ` + ranges + `}`},
		"kind": {
			`{"type": "ptp", "ipMasq": false, "mtu": 1500, "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state",
				"routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "10.244.0.0/24"}]]}},
			{"type": "portmap", "capabilities": {"portMappings": true}}`,
			`{"type": "ebpfnet", "ipMasq": false, "mtu": 1500, "capabilities": {"portMappings": true, "ips": true},
			"ipam": {"type": "host-local", "dataDir": "/run/cni-ipam-state", "routes": [{"dst": "0.0.0.0/0"}], "ranges": [[{"subnet": "10.244.0.0/24"}]]}}`},
		"flannel": {
			`{"type": "flannel", "delegate": {"hairpinMode": true, "isDefaultGateway": true}}, {"type": "portmap", "capabilities": {"portMappings": true}}`,
			`{"type": "ebpfnet", "ipMasq": false, "mtu": 1450, "capabilities": {"portMappings": true, "ips": true}, "ipam": {"type": "host-local",
				"ranges": [[{"subnet": "10.244.1.0/24"}]], "routes": [{"dst": "10.244.0.0/16"}, {"dst": "0.0.0.0/0"}]}}`},
		"tuned, limited, with a default gateway": {
			`{"type": "bridge", "isDefaultGateway": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]}},
			{"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}, "dataDir": "/run/tuning"}, {"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 80000, "capabilities": {"bandwidth": true}}`,
			`{"type": "ebpfnet", "sysctl": {"net.core.somaxconn": "500"}, "ingressRate": 8000000, "ingressBurst": 80000, "capabilities": {"bandwidth": true},
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]], "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}`},
	} {
		t.Run(name, func(t *testing.T) {
			translation, err := translated(t, test.old, subnetEnv)
			if err != nil {
				t.Fatal(err)
			}
			var got, want any
			if err := json.Unmarshal(translation.conflist, &got); err != nil {
				t.Fatal(err)
			}
			if err := json.Unmarshal([]byte(`{"cniVersion": "0.3.1", "name": "pods", "plugins": [`+test.want+`]}`), &want); err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got %s, want %s", translation.conflist, test.want)
			}
		})
	}
}

// TestMorePlugins refuses a list that has plugins in a directory of its own, which the new list would have as well.
func TestMorePlugins(t *testing.T) {
	list, err := libcni.NetworkConfFromBytes([]byte(`{"cniVersion": "1.0.0", "name": "pods", "plugins": [
		{"type": "ptp", "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]]}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	more, err := libcni.NetworkPluginConfFromBytes([]byte(`{"type": "portmap"}`))
	if err != nil {
		t.Fatal(err)
	}
	list.Plugins = append(list.Plugins, more)
	if _, err := (&host{}).translate(list); err == nil || !strings.Contains(err.Error(), `directory "pods"`) {
		t.Errorf("got %v, want an error that names the directory", err)
	}
}

// TestNotTranslated refuses what ebpfnet would not do, and says what that is.
func TestNotTranslated(t *testing.T) {
	const ipam = `"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]]}`

	for name, test := range map[string]struct{ old, env, want string }{
		"another gateway":  {`{"type": "bridge", ` + ipam + `}`, "", "isGateway"},
		"VLAN":             {`{"type": "bridge", "isGateway": true, "vlan": 7, ` + ipam + `}`, "", "vlan"},
		"conditions":       {`{"type": "ptp", ` + ipam + `}, {"type": "portmap", "conditionsV4": ["!", "-d", "192.0.2.0/24"]}`, "", "portSources"},
		"some limited":     {`{"type": "ptp", ` + ipam + `}, {"type": "bandwidth", "egressRate": 8000, "unshapedSubnets": ["10.0.0.0/8"]}`, "", "unshapedSubnets"},
		"MAC":              {`{"type": "ptp", ` + ipam + `}, {"type": "tuning", "mac": "02:00:00:00:00:01"}`, "", "mac"},
		"DHCP":             {`{"type": "bridge", "isGateway": true, "ipam": {"type": "dhcp"}}`, "", "IPAM plugin dhcp"},
		"no addresses":     {`{"type": "bridge", "isGateway": true}`, "", "IPAM plugin"},
		"another plugin":   {`{"type": "ptp", ` + ipam + `}, {"type": "sbr"}`, "", `"sbr"`},
		"a bad subnet":     {`{"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.88.0.0/33"}}`, "", "10.88.0.0/33"},
		"flannel, no file": {`{"type": "flannel", "delegate": {"type": "ipvlan"}}`, "", "ipvlan"},
		"flannel, empty":   {`{"type": "flannel"}`, "", "FLANNEL_SUBNET"},
		"flannel, IPv6":    {`{"type": "flannel"}`, subnetEnv + "FLANNEL_IPV6_SUBNET=fd00::/64\n", "FLANNEL_IPV6_SUBNET"},
		"macvlan":          {`{"type": "macvlan", ` + ipam + `}`, "", ""},
		"calico":           {`{"type": "calico"}`, "", ""},
	} {
		_, err := translated(t, test.old, test.env)
		if err == nil || !strings.Contains(err.Error(), test.want) || (test.want == "") != errors.Is(err, errOther) {
			t.Errorf("%s: got %v, want an error with %q", name, err, test.want)
		}
	}
}
