package migrate

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// translated translates plugins.
func translated(t *testing.T, plugins string) (*translation, error) {
	t.Helper()
	list, err := libcni.NetworkConfFromBytes([]byte(`{"cniVersion": "0.3.1", "name": "pods", "plugins": [` + plugins + `]}`))
	if err != nil {
		t.Fatal(err)
	}
	return translate(list)
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
		"tuned, limited, with a default gateway": {
			`{"type": "bridge", "isDefaultGateway": true, "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]]}},
			{"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}, "dataDir": "/run/tuning"}, {"type": "bandwidth", "ingressRate": 8000000, "ingressBurst": 80000, "capabilities": {"bandwidth": true}}`,
			`{"type": "ebpfnet", "sysctl": {"net.core.somaxconn": "500"}, "ingressRate": 8000000, "ingressBurst": 80000, "capabilities": {"bandwidth": true},
			"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00::/64"}]], "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}`},
	} {
		t.Run(name, func(t *testing.T) {
			translation, err := translated(t, test.old)
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
	if _, err := translate(list); err == nil || !strings.Contains(err.Error(), `directory "pods"`) {
		t.Errorf("got %v, want an error that names the directory", err)
	}
}

// TestNotTranslated refuses what ebpfnet would not do, and says what that is.
func TestNotTranslated(t *testing.T) {
	const ipam = `"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]]}`

	for name, test := range map[string]struct{ old, want string }{
		"another gateway": {`{"type": "bridge", ` + ipam + `}`, "isGateway"},
		"VLAN":            {`{"type": "bridge", "isGateway": true, "vlan": 7, ` + ipam + `}`, "vlan"},
		"conditions":      {`{"type": "ptp", ` + ipam + `}, {"type": "portmap", "conditionsV4": ["!", "-d", "192.0.2.0/24"]}`, "portSources"},
		"some limited":    {`{"type": "ptp", ` + ipam + `}, {"type": "bandwidth", "egressRate": 8000, "unshapedSubnets": ["10.0.0.0/8"]}`, "unshapedSubnets"},
		"MAC":             {`{"type": "ptp", ` + ipam + `}, {"type": "tuning", "mac": "02:00:00:00:00:01"}`, "mac"},
		"DHCP":            {`{"type": "bridge", "isGateway": true, "ipam": {"type": "dhcp"}}`, "IPAM plugin dhcp"},
		"no addresses":    {`{"type": "bridge", "isGateway": true}`, "IPAM plugin"},
		"another plugin":  {`{"type": "ptp", ` + ipam + `}, {"type": "sbr"}`, `"sbr"`},
		"a bad subnet":    {`{"type": "ptp", "ipam": {"type": "host-local", "subnet": "10.88.0.0/33"}}`, "10.88.0.0/33"},
		"flannel":         {`{"type": "flannel"}`, ""},
		"macvlan":         {`{"type": "macvlan", ` + ipam + `}`, ""},
		"calico":          {`{"type": "calico"}`, ""},
	} {
		_, err := translated(t, test.old)
		if err == nil || !strings.Contains(err.Error(), test.want) || (test.want == "") != errors.Is(err, errOther) {
			t.Errorf("%s: got %v, want an error with %q", name, err, test.want)
		}
	}
}
