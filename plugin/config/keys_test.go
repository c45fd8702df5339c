package config

import (
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
)

// parsedKeys parses a configuration with more keys as ADD does, and returns what it says about them.
func parsedKeys(t *testing.T, stdin []byte) (*Call, error) {
	t.Helper()
	call, err := NewCall(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: stdin})
	if err != nil {
		t.Fatal(err)
	}
	_, err = call.Parse()
	return call, err
}

// TestSlips requires that a slip of one of our keys is refused, with the key that was meant.
func TestSlips(t *testing.T) {
	const prev = `"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.88.0.7/16"}]}`
	for _, test := range []struct {
		stdin      []byte
		key, meant string
	}{
		{confWith(`"ipmasq": true`), "ipmasq", "ipMasq"},
		{confWith(`"IPMasq": true`), "IPMasq", "ipMasq"},
		{confWith(`"ipMask": true`), "ipMask", "ipMasq"},
		{confWith(`"ipmask": true`), "ipmask", "ipMasq"},
		{confWith(`"ip_masq": true`), "ip_masq", "ipMasq"},
		{confWith(`"ipMsaq": true`), "ipMsaq", "ipMasq"},
		{confWith(`"antiSpofo": true`), "antiSpofo", "antiSpoof"},
		{confWith(`"anti-spof": true`), "anti-spof", "antiSpoof"},
		{confWith(`"ingresPolici": "isolated"`), "ingresPolici", "ingressPolicy"},
		{confWith(`"uplink": ["eth0"]`), "uplink", "uplinks"},
		{confWith(`"MTU": 1400`), "MTU", "mtu"},
		{confWith(`"mut": 1400`), "mut", "mtu"},
		{confWith(`"capabilites": {"portMappings": true}`), "capabilites", "capabilities"},
		{confWith(`"capabilities": {"portMapings": true}`), "capabilities.portMapings", "portMappings"},
		{confWith(`"capabilities": {"portmappings": true}`), "capabilities.portmappings", "portMappings"},
		{confWith(`"args": {"cni": {"portSource": []}}`), "args.cni.portSource", "portSources"},
		{without(`"ipma": {"type": "host-local"}`), "ipma", "ipam"},
		{without(`"ipam": {"type": "host-local", "subnet": "10.88.0.0/16", "gatway": "10.88.0.9"}`), "ipam.gatway", "gateway"},
		{without(`"ipam": {"type": "host-local", "subnet": "10.88.0.0/16", "route": [{"dst": "0.0.0.0/0"}]}`), "ipam.route", "routes"},
		{without(`"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}, {"subnet": "10.89.0.0/16", "rangeSart": "10.89.0.9"}]]}`),
			"ipam.ranges[0][1].rangeSart", "rangeStart"},
		{without(prev, `"antiSpof": false`), "antiSpof", "antiSpoof"}, // after another plugin
	} {
		t.Run(test.key, func(t *testing.T) {
			_, err := parsedKeys(t, test.stdin)
			wantCode(t, err, cnitypes.ErrUnsupportedField, test.key, "did you mean "+test.meant+"?")
		})
	}
}

// TestKeysOfOthers requires that keys of others pass, whatever their value, and are listed for the log: those of IPAM
// plugins, which get the whole configuration, comments, and short keys that no slip makes of ours.
func TestKeysOfOthers(t *testing.T) {
	const prev = `"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.88.0.7/16"}]}`
	for name, keys := range map[string]string{
		"calico": `mode vxlan_mac_prefix qps burst num_queues nodename nodename_file ipam_lock_file nodename_file_optional datastore_type
			etcd_endpoints etcd_discovery_srv log_level log_file_path log_file_max_size log_file_max_age log_file_max_count kubernetes
			feature_control etcd_scheme etcd_key_file etcd_cert_file etcd_ca_cert_file container_settings include_default_routes
			dataplane_options windows_use_single_network readiness_gates policy_setup_timeout_seconds endpoint_status_dir etcd_authority
			hostname require_mtu_file calico_api_group org.apache.mesos`,
		"others":   `log_file log-file log-level enable-debug kubeconfig delegates readinessindicatorfile subnetFile pluginLogFile vethPrefix server_socket`,
		"comments": `_comment comment // # description Documentation x-vendor example.com/key a/b cni.dev/attachments podman_labels disabled`,
		"short":    `mt log tag ns id ip vni qps ttl links path host names0 service2 isDefault`,
	} {
		names := strings.Fields(keys)
		for _, conf := range []func(...string) []byte{confWith, without, func(more ...string) []byte { return without(append(more, prev)...) }} {
			var pairs []string
			for i, key := range names {
				pairs = append(pairs, fmt.Sprintf("%q: %s", key, []string{`"x"`, `{"a": [1]}`, `true`, `null`}[i%4]))
			}
			call, err := parsedKeys(t, conf(pairs...))
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			listed := strings.Join(append(call.ForeignKeys(), call.IgnoredKeys()...), " ") + " "
			for _, key := range names {
				if !strings.Contains(listed, key) {
					t.Errorf("%s: the log would not name %s: %s", name, key, listed)
				}
			}
		}
	}
}

// TestForeignInNested requires that keys of others in our own sections are listed with their places.
func TestForeignInNested(t *testing.T) {
	call, err := parsedKeys(t, without(`"ipam": {"type": "host-local", "Documentation": "x", "Subnet": "10.88.0.0/16"}, "args": {"cni": {"vendor": 1}, "podman_labels": {}}`,
		`"capabilities": {"io.kubernetes.cri.pod-annotations": true}`))
	if err != nil {
		t.Fatal(err)
	}
	want := "args.cni.vendor capabilities.io.kubernetes.cri.pod-annotations ipam.Documentation"
	if got := strings.Join(call.ForeignKeys(), " "); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestOthersIPAM leaves the section of another IPAM plugin to that plugin.
func TestOthersIPAM(t *testing.T) {
	call, err := parsedKeys(t, without(`"ipam": {"type": "whereabouts", "range": "10.88.0.0/16", "gatewya": 1}`))
	if err != nil || len(call.ForeignKeys()) > 0 {
		t.Errorf("got %v, %v; want neither", call.ForeignKeys(), err)
	}
}

// TestKeysOfReferencePlugins requires an answer to each key of bridge, ptp, macvlan and ipvlan, and of the plugins that
// ebpfnet replaces: ebpfnet has it, ignores it, or refuses it and says what to write instead.
func TestKeysOfReferencePlugins(t *testing.T) {
	const ignored, refused = "ignored", "refused"
	for _, test := range []struct{ key, want, word string }{
		{`"bridge": "cni0"`, ignored, "no bridge"},
		{`"isGateway": true`, ignored, "gateway"},
		{`"isDefaultGateway": true`, ignored, "ipam.routes"},
		{`"forceAddress": false`, ignored, "no bridge"},
		{`"ipMasqBackend": "nftables"`, ignored, "eBPF"},
		{`"hairpinMode": true`, ignored, "host ports"},
		{`"promiscMode": true`, ignored, "no bridge"},
		{`"preserveDefaultVlan": false`, ignored, "VLAN"},
		{`"macspoofchk": true`, ignored, "antiSpoof"},
		{`"enabledad": true`, ignored, "once"},
		{`"mode": "l3"`, ignored, "ingressPolicy"},
		{`"bcqueuelen": 1000`, ignored, "macvlan"},
		{`"snat": true`, ignored, "rules"},
		{`"masqAll": true`, ignored, "rules"},
		{`"markMasqBit": 5`, ignored, "rules"},
		{`"externalSetMarkChain": "KUBE-MARK-MASQ"`, ignored, "rules"},
		{`"backend": "iptables"`, ignored, "rules"},
		{`"iptablesAdminChainName": "A"`, ignored, "rules"},
		{`"firewalldZone": "trusted"`, ignored, "rules"},

		{`"vlan": 100`, refused, `"bridge"`},
		{`"vlanTrunk": [{"id": 101}]`, refused, `"bridge"`},
		{`"portIsolation": true`, refused, `"ingressPolicy": "isolated"`},
		{`"disableContainerInterface": true`, refused, `"bridge"`},
		{`"master": "eth0"`, refused, `"uplinks": ["eth0"]`},
		{`"linkInContainer": true`, refused, "host"},
		{`"mac": "02:00:00:00:00:01"`, refused, `"args": {"cni": {"mac": `},
		{`"conditionsV4": ["-s", "192.0.2.0/24"]`, refused, "portSources"},
		{`"conditionsV6": ["-s", "2001:db8::/64"]`, refused, "portSources"},
		{`"deviceID": "0000:00:01.0"`, refused, "veth"},

		// A zero value asks for nothing.
		{`"vlan": 0`, "", ""},
		{`"vlanTrunk": []`, "", ""},
		{`"portIsolation": false`, "", ""},
		{`"master": ""`, "", ""},
		{`"linkInContainer": false`, "", ""},
		{`"ipMasq": true, "mtu": 1400, "ingressPolicy": "same-network", "promisc": true, "allmulti": true, "txQLen": 7`, "", ""},
	} {
		t.Run(test.key, func(t *testing.T) {
			call, err := parsedKeys(t, confWith(test.key))
			name, value, _ := strings.Cut(test.key, ": ")
			name = strings.Trim(name, `"`)
			switch {
			case test.want == refused:
				wantCode(t, err, cnitypes.ErrUnsupportedField, name, value[:min(len(value), 4)], test.word)
			case err != nil:
				t.Error(err)
			case test.want == ignored:
				got := call.IgnoredKeys()
				if len(got) != 1 || !strings.HasPrefix(got[0], name+": ") || !strings.Contains(got[0], test.word) {
					t.Errorf("got %q, want %s, and %q", got, name, test.word)
				}
			case len(call.IgnoredKeys()) > 0:
				t.Errorf("got %q, want nothing", call.IgnoredKeys())
			}
		})
	}
}

// TestManyKeys parses keys without end: long ones, and many.
func TestManyKeys(t *testing.T) {
	pairs := []string{fmt.Sprintf("%q: 1", "ipMasq"+strings.Repeat("q", 1<<20))}
	for i := range 10_000 {
		pairs = append(pairs, fmt.Sprintf("%q: 1", fmt.Sprint("key of others ", i)))
	}
	if _, err := parsedKeys(t, confWith(pairs...)); err != nil {
		t.Errorf("%.200s", err)
	}
}

// TestDistance compares keys.
func TestDistance(t *testing.T) {
	for _, test := range []struct {
		a, b string
		want int
	}{
		{"", "", 0}, {"a", "", 1}, {"mtu", "mut", 1}, {"ipmasq", "ipmasq", 0}, {"ipmasq", "pimaqs", 2}, {"ipmasq", "ipmask", 1},
		{"device", "service", 2}, {"uplinks", "links", 2}, {"kitten", "sitting", 3}, {"ca", "abc", 3},
	} {
		if got := distance(test.a, test.b); got != test.want {
			t.Errorf("%q, %q: got %d, want %d", test.a, test.b, got, test.want)
		}
		if got := distance(test.b, test.a); got != test.want {
			t.Errorf("%q, %q: got %d, want %d", test.b, test.a, got, test.want)
		}
	}
}
