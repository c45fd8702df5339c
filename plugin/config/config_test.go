package config

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"

	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// parse parses a call as ADD does.
func parse(args *skel.CmdArgs) (*Config, error) {
	call, err := NewCall(args)
	if err != nil {
		return nil, err
	}
	return call.Parse()
}

// parseForRelease parses a call as DEL does.
func parseForRelease(args *skel.CmdArgs) (*Config, error) {
	call, err := NewCall(args)
	if err != nil {
		return nil, err
	}
	return call.ParseForRelease()
}

// confWith returns a configuration with more keys, as JSON text.
func confWith(keys ...string) []byte {
	keys = append([]string{
		`"cniVersion": "1.0.0", "name": "pods", "type": "ebpfnet"`,
		`"ipam": {"type": "host-local", "ranges": [[{"subnet": "10.88.0.0/16"}]]}`,
	}, keys...)
	return []byte("{" + strings.Join(keys, ", ") + "}")
}

// without returns a configuration without ipam.
func without(keys ...string) []byte {
	return []byte("{" + strings.Join(append([]string{`"cniVersion": "1.0.0", "name": "pods", "type": "ebpfnet"`}, keys...), ", ") + "}")
}

func TestParse(t *testing.T) {
	tcp8080 := fmt.Sprint([]HostPort{{HostPort: 8080, ContainerPort: 80, Protocol: maps.TCP}})
	for _, test := range []struct {
		name, args string
		keys       []string
		what       func(*Config) string
		want       string
	}{
		{"defaults", "", nil, func(c *Config) string { return fmt.Sprint(c.Masq.IPv4, c.MTU, c.MAC, c.HostPorts, c.PrevResult) }, "false 0  [] <nil>"},
		{"attachment", "", nil, func(c *Config) string { return fmt.Sprint(c.Attachment, " ", c.CNIVersion) }, "{pods c1 eth0} 1.0.0"},
		{"ipMasq", "", []string{`"ipMasq": true`}, func(c *Config) string { return fmt.Sprint(c.Masq.IPv4) }, "true"},
		{"a family of ipMasq", "", []string{`"ipMasq": true, "ipMasq6": false`}, masqOf, "true false []"},
		{"the other family", "", []string{`"ipMasq6": true`}, masqOf, "false true []"},
		{"masqTunnels", "", []string{`"ipMasq4": true, "masqTunnels": true`}, func(c *Config) string {
			return fmt.Sprint(c.Masq.TunnelsFor(netip.MustParseAddr("10.0.0.1")), c.Masq.TunnelsFor(netip.MustParseAddr("fd00::1")))
		}, "true false"},
		{"nonMasqueradeCIDRs", "", []string{`"ipMasq": true, "nonMasqueradeCIDRs": ["10.0.0.0/8", "fd00::/8"]`}, masqOf, "true true [10.0.0.0/8 fd00::/8]"},
		{"maxFlows", "", []string{`"maxFlows": 1024`}, func(c *Config) string { return fmt.Sprint(c.MaxFlows) }, "1024"},
		{"cluster", "", []string{`"cluster": "/run/n.json"`}, func(c *Config) string { return c.Cluster }, "/run/n.json"},
		{"a pod", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web;K8S_POD_UID=u1", []string{`"policyUnknown": "fail"`},
			func(c *Config) string { return fmt.Sprint(c.Pod, c.RefusesPod) }, "{shop web u1} true"},
		{"a held pod", "", []string{`"policyUnknown": "hold"`}, func(c *Config) string { return fmt.Sprint(c.Pod.UID, c.RefusesPod) }, "false"},
		{"least MTU", "", []string{`"mtu": 68`}, func(c *Config) string { return fmt.Sprint(c.MTU) }, "68"},
		{"largest MTU", "", []string{`"mtu": 65535`}, func(c *Config) string { return fmt.Sprint(c.MTU) }, "65535"},
		{"MAC of CNI_ARGS", "MAC=02:00:00:00:00:01", nil, macOfConfig, "02:00:00:00:00:01"},
		{"MAC of args", "MAC=02:00:00:00:00:01", []string{`"args": {"cni": {"mac": "02:00:00:00:00:02"}}`}, macOfConfig, "02:00:00:00:00:02"},
		{"MAC of the runtime", "MAC=02:00:00:00:00:01",
			[]string{`"args": {"cni": {"mac": "02:00:00:00:00:02"}}`, `"runtimeConfig": {"mac": "02:00:00:00:00:03"}`}, macOfConfig, "02:00:00:00:00:03"},
		{"IP of CNI_ARGS", "IP=10.88.0.7", nil, requestedOf, "[10.88.0.7]"},
		{"IP of args", "IP=10.88.0.7", []string{`"args": {"cni": {"ips": ["10.88.0.8/24"]}}`}, requestedOf, "[10.88.0.8]"},
		{"IP of the runtime", "IP=10.88.0.7", []string{`"args": {"cni": {"ips": ["10.88.0.8"]}}`, `"runtimeConfig": {"ips": ["10.88.0.9"]}`}, requestedOf, "[10.88.0.9]"},
		{"empty list of the runtime asks for nothing", "IP=10.88.0.7", []string{`"runtimeConfig": {"ips": []}`}, requestedOf, "[10.88.0.7]"},
		{"DNS", "", []string{`"dns": {"nameservers": ["192.0.2.53"], "domain": "a.test"}`}, dnsOf, "{[192.0.2.53] a.test [] []}"},
		{"DNS of the runtime replaces all", "", []string{`"dns": {"nameservers": ["192.0.2.53"], "domain": "a.test"}`, `"runtimeConfig": {"dns": {"searches": ["b.test"]}}`},
			dnsOf, "{[]  [b.test] []}"},
		{"no policy", "", nil, ruleSetsOf, "open open"},
		{"ingressPolicy", "", []string{`"ingressPolicy": "isolated"`}, ruleSetsOf, "rules open"},
		{"policy", "", []string{`"policy": {"egress": []}`}, ruleSetsOf, "open rules"},
		{"policyMode", "", []string{`"policy": {"host": false}, "policyMode": "audit"`}, ruleSetsOf, "audit audit"},
		{"enforced policy", "", []string{`"policy": {"internal": true}, "policyMode": "enforce"`}, ruleSetsOf, "rules rules"},
		{"keys of others", "", []string{`"cni.dev/attachments": []`, `"example.com/key": 1`, `"a/b": 2`}, func(*Config) string { return "" }, ""},
		{"keys of the specification", "", []string{`"disableCheck": true`, `"disableGC": true`, `"capabilities": {"portMappings": true}`}, func(*Config) string { return "" }, ""},
		{"capabilities that are null", "", []string{`"runtimeConfig": {"bandwidth": null, "deviceID": null, "dns": null}`}, func(*Config) string { return "" }, ""},
		{"limits of the runtime", "",
			[]string{`"unshapedSubnets": ["10.0.0.0/8"]`, `"runtimeConfig": {"bandwidth": {"ingressRate": 9000, "egressRate": 8000}}`}, bandwidthOf,
			"9000 8000 [10.0.0.0/8]"},
		{"limits of the network", "",
			[]string{`"egressRate": 8000`, `"runtimeConfig": {"bandwidth": {"ingressRate": 9000, "unshapedSubnets": ["10.0.0.0/8"]}}`}, bandwidthOf,
			"0 8000 []"},
		{"prevResult that is null", "", []string{`"prevResult": null`}, func(c *Config) string { return fmt.Sprint(c.PrevResult) }, "<nil>"},
		{"bigTCP, not set", "", nil, bigTCPOf, "true"},
		{"bigTCP null", "", []string{`"bigTCP": null`}, bigTCPOf, "true"},
		{"bigTCP true", "", []string{`"bigTCP": true`}, bigTCPOf, "true"},
		{"bigTCP false", "", []string{`"bigTCP": false`}, bigTCPOf, "false"},
		{"bigTCP auto", "", []string{`"bigTCP": "auto"`}, bigTCPOf, "true"},
		{"bigTCP never", "", []string{`"bigTCP": "never"`}, bigTCPOf, "false"},
		{"prevResult", "", []string{`"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.88.0.7/16"}]}`},
			func(c *Config) string { return c.PrevResult.IPs[0].Address.String() }, "10.88.0.7/16"},
		{"host port of podman", "", []string{`"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}`}, portsOf, tcp8080},
		{"host port of podman, any address", "", []string{`"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}]}`}, portsOf, tcp8080},
		{"host port of containerd", "", []string{`"runtimeConfig": {"portMappings": [{"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""}]}`}, portsOf, tcp8080},
		{"host port with an unknown key", "", []string{`"runtimeConfig": {"portMappings": [{"hostPort": 8080, "containerPort": 80, "appProtocol": "http"}]}`}, portsOf, tcp8080},
		{"Kubernetes", "K8S_POD_NAME=web;K8S_POD_UID=1;K8S_POD_NAMESPACE=a;K8S_POD_INFRA_CONTAINER_ID=c1", nil, func(*Config) string { return "" }, ""},
		{"unknown key of CNI_ARGS", "FOO=bar;IgnoreUnknown=1", nil, func(*Config) string { return "" }, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			config, err := parse(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Args: test.args, StdinData: confWith(test.keys...)})
			if err != nil {
				t.Fatal(err)
			}
			if got := test.what(config); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func bandwidthOf(c *Config) string {
	return fmt.Sprint(c.Bandwidth.Ingress.Rate, c.Bandwidth.Egress.Rate, c.Bandwidth.Unshaped)
}

func ruleSetsOf(c *Config) string {
	word := func(set *maps.RuleSet) string {
		switch {
		case set == nil:
			return "open"
		case set.Audit:
			return "audit"
		}
		return "rules"
	}
	ingress, egress := c.RuleSets()
	return word(ingress) + " " + word(egress)
}

func bigTCPOf(c *Config) string    { return fmt.Sprint(c.BigTCP) }
func portsOf(c *Config) string     { return fmt.Sprint(c.HostPorts) }
func macOfConfig(c *Config) string { return c.MAC.String() }
func requestedOf(c *Config) string { return fmt.Sprint(c.IPAM.Requested) }
func dnsOf(c *Config) string {
	return fmt.Sprint(struct {
		Nameservers     []string
		Domain          string
		Search, Options []string
	}(c.DNS))
}

func TestParseErrors(t *testing.T) {
	for _, test := range []struct {
		name, args string
		stdin      []byte
		code       uint
		words      []string
	}{
		{"cut off", "", []byte(`{"name": "po`), cnitypes.ErrDecodingFailure, nil},
		{"unknown key", "", confWith(`"ipmask": true`), cnitypes.ErrUnsupportedField, []string{"ipmask", "true"}},
		{"rate too low", "", confWith(`"runtimeConfig": {"bandwidth": {"ingressRate": 8}}`), cnitypes.ErrInvalidNetworkConfig, []string{"runtimeConfig.bandwidth.ingressRate", "8", "8000"}},
		{"policy of Calico", "", confWith(`"policy": {"type": "k8s"}`), cnitypes.ErrUnsupportedField, []string{"policy.type", "k8s", "ingress, egress"}},
		{"policy null", "", confWith(`"policy": null`), cnitypes.ErrInvalidNetworkConfig, []string{"policy null", "an object"}},
		{"policy twice", "", confWith(`"policy": {}, "ingressPolicy": "open"`), cnitypes.ErrInvalidNetworkConfig, []string{"ingressPolicy", `"policy" is there, too`}},
		{"policyMode", "", confWith(`"policyMode": "log"`), cnitypes.ErrInvalidNetworkConfig, []string{"policyMode", "log", `"enforce" or "audit"`}},
		{"wrong type", "", confWith(`"ipMasq": 1`), cnitypes.ErrInvalidNetworkConfig, []string{"ipMasq", "true or false"}},
		{"sysctl of the host", "", confWith(`"sysctl": {"kernel.hostname": "a"}`), cnitypes.ErrInvalidNetworkConfig, []string{"sysctl", "kernel.hostname"}},
		{"sysctl out of net", "", confWith(`"sysctl": {"net/../kernel/hostname": "a"}`), cnitypes.ErrInvalidNetworkConfig, []string{"sysctl", "net/../kernel/hostname"}},
		{"sysctl of two slashes", "", confWith(`"sysctl": {"net//core/somaxconn": "1"}`), cnitypes.ErrInvalidNetworkConfig, []string{"sysctl", "net//core/somaxconn"}},
		{"MTU", "", confWith(`"mtu": 67`), cnitypes.ErrInvalidNetworkConfig, []string{"mtu 67", "68"}},
		{"IPv4 network written as IPv6", "", confWith(`"nonMasqueradeCIDRs": ["10.0.0.0/8", "::ffff:10.0.0.0/104"]`), cnitypes.ErrInvalidNetworkConfig, []string{"nonMasqueradeCIDRs[1]", "::ffff:10.0.0.0/104", "10.0.0.0/8"}},
		{"multicast MAC", "MAC=01:00:00:00:00:01", confWith(), cnitypes.ErrInvalidEnvironmentVariables, []string{"CNI_ARGS", "01:00:00:00:00:01"}},
		{"unknown argument", "FOO=bar", confWith(), cnitypes.ErrInvalidEnvironmentVariables, []string{"CNI_ARGS", "FOO=bar"}},
		{"ports without ipam", "", without(`"runtimeConfig": {"portMappings": [{"hostPort": 80, "containerPort": 80}]}`), cnitypes.ErrInvalidNetworkConfig, []string{"runtimeConfig.portMappings", "80", "ipam"}},
		{"addresses without ipam", "", without(`"runtimeConfig": {"ips": ["10.88.0.7"]}`), cnitypes.ErrInvalidNetworkConfig, []string{"runtimeConfig.ips", "10.88.0.7", "ipam"}},
		{"ranges without ipam", "", without(`"runtimeConfig": {"ipRanges": [[{"subnet": "10.88.0.0/16"}]]}`), cnitypes.ErrInvalidNetworkConfig, []string{"runtimeConfig.ipRanges", "10.88.0.0/16", "ipam"}},
		{"addresses of args without ipam", "", without(`"args": {"cni": {"ips": ["10.88.0.7"]}}`), cnitypes.ErrInvalidNetworkConfig, []string{"args.cni.ips", "10.88.0.7", "ipam"}},
		{"IP without ipam", "IP=10.88.0.7", without(), cnitypes.ErrInvalidEnvironmentVariables, []string{"CNI_ARGS", "10.88.0.7", "ipam"}},
		{"ipam of no type", "", []byte(`{"name": "pods", "ipam": {"subnet": "10.88.0.0/16"}}`), cnitypes.ErrInvalidNetworkConfig, []string{"ipam.type", "host-local"}},
		{"ipam of the plugin itself", "", []byte(`{"name": "pods", "ipam": {"type": "ebpfnet"}}`), cnitypes.ErrInvalidNetworkConfig, []string{"ipam.type", "ebpfnet", "host-local"}},
		{"host-local's own", "", []byte(`{"name": "pods", "ipam": {"type": "host-local"}}`), cnitypes.ErrInvalidNetworkConfig, []string{"ipam.ranges"}},
		{"null in prevResult", "", confWith(`"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.88.0.7/16"}, null]}`), cnitypes.ErrInvalidNetworkConfig, []string{"prevResult.ips[1]", "null"}},
		{"prevResult", "", confWith(`"prevResult": {"cniVersion": "1.0.0", "ips": 1}`), cnitypes.ErrInvalidNetworkConfig, []string{"prevResult"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := parse(&skel.CmdArgs{Args: test.args, StdinData: test.stdin})
			wantCode(t, err, test.code, test.words...)
		})
	}
}

func wantCode(t *testing.T, err error, code uint, words ...string) {
	t.Helper()
	var coded *cnitypes.Error
	if !errors.As(err, &coded) || coded.Code != code {
		t.Fatalf("got %#v, want code %d", err, code)
	}
	for _, word := range words {
		if !strings.Contains(coded.Msg, word) {
			t.Errorf("error lacks %q: %s", word, coded.Msg)
		}
	}
}

// TestParseForRelease parses a configuration that only DEL and GC accept: they need the names and the
// directory alone.
func TestParseForRelease(t *testing.T) {
	stdin := []byte(`{"name": "pods", "ipmask": 1, "mtu": "x", "runtimeConfig": 7, "ipam": {"type": "host-local", "dataDir": "/d", "ranges": "x"}}`)
	config, err := parseForRelease(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Args: "FOO", StdinData: stdin})
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(config.Attachment, " ", config.IPAM.Dir()); got != "{pods c1 eth0} /d/pods" {
		t.Errorf("got %s", got)
	}
}

func masqOf(c *Config) string { return fmt.Sprint(c.Masq.IPv4, c.Masq.IPv6, c.Masq.NonMasq) }

// TestCheckPosition requests what ebpfnet can and cannot do after another plugin.
func TestCheckPosition(t *testing.T) {
	const prev = `"prevResult": {"cniVersion": "1.0.0", "ips": [{"address": "10.88.0.7/16"}]}`
	prevWith := func(name string) string {
		return `"prevResult": {"cniVersion": "1.0.0", "interfaces": [{"name": "` + name + `", "sandbox": "/run/netns/c1"}]}`
	}
	for _, test := range []struct {
		name  string
		stdin []byte
		words []string // none: accepted
	}{
		{"nothing", without(prev), nil},
		{"ports", without(prev, `"runtimeConfig": {"portMappings": [{"hostPort": 80, "containerPort": 80}]}`), nil},
		{"addresses, which podman asks all plugins for", without(prev, `"runtimeConfig": {"ips": ["10.88.0.7"]}`), nil},
		{"ipam", confWith(prev), nil},
		{"ipam after loopback", confWith(prevWith("lo")), nil},
		{"ipam for another plugin's interface", confWith(prevWith("eth0")), []string{"prevResult.interfaces", "eth0", "ipam"}},
		{"delegated ipam", without(prevWith("lo"), `"ipam": {"type": "static"}`, `"mtu": 1400`), nil},
		{"delegated ipam for another plugin's interface", without(prevWith("eth0"), `"ipam": {"type": "static"}`), []string{"prevResult", "eth0"}},
		{"mtu", without(prev, `"mtu": 1400`), []string{"mtu", "1400"}},
		{"device", without(prev, `"device": "netkit"`), []string{"device", "netkit"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			config, err := parse(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: test.stdin})
			if err != nil {
				t.Fatal(err)
			}
			if err = config.CheckPosition(); test.words != nil {
				wantCode(t, err, cnitypes.ErrUnsupportedField, test.words...)
			} else if err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPolicySettings applies settings of a policy, each after those before it, to a container with a policy.
func TestPolicySettings(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.json")
	if err := os.WriteFile(file, []byte("{\n\"egress\": []\n}"), 0o600); err != nil {
		t.Fatal(err)
	}
	conf := confWith(`"policy": {"ingress": []}`)
	var kept record.Settings
	for _, step := range []struct{ pairs, want string }{
		{"antiSpoof=true", "rules open"},
		{"policyMode=audit", "audit open"},
		{"policy=" + file, "open audit"},
		{"antiSpoof=false", "open audit"},
		{"policyMode=enforce", "open rules"},
		{"policy=none", "open open"},
		{"ingressPolicy=isolated", "rules open"},
		{"policy=" + file, "policy: the container has ingressPolicy=isolated: set it to open, or remove the policy by policy=none"},
		{"ingressPolicy=open", "open rules"},
		{"policy=", "open open"},
		{"policy=/nowhere", `policy "/nowhere": expected a file with a policy, or none (open /nowhere: no such file or directory)`},
		{"ingressPolicy=isolated policy=" + file, "policy: the container has ingressPolicy=isolated: set it to open, or remove the policy by policy=none"},
		{"policyMode=off", `policyMode "off": expected "enforce" or "audit"`},
	} {
		c, err := parse(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: conf})
		if err != nil {
			t.Fatal(err)
		}
		settings, err := ParseSettings(strings.Fields(step.pairs))
		if err == nil {
			kept.Merge(settings)
			err = c.Apply(kept)
		}
		got := ruleSetsOf(c)
		if err != nil {
			got = err.Error()
		}
		if got != step.want {
			t.Errorf("%s: got %s, want %s", step.pairs, got, step.want)
		}
	}
	if text := fmt.Sprintf("%+v", kept); !strings.Contains(text, "Policy:none") {
		t.Errorf("kept %s", text)
	}
}

// TestDocuments requires that the documents name each key.
func TestDocuments(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if more, err := os.ReadFile("../README.md"); err == nil {
		text = append(text, more...)
	}
	specified := []string{"cniVersion", "name", "type", "capabilities", "args", "runtimeConfig", "prevResult"}
	for _, key := range keysOf(reflect.TypeFor[netConf]()) {
		if !slices.Contains(specified, key) && !strings.Contains(string(text), "`"+key+"`") {
			t.Errorf("neither README.md nor plugin/README.md names %s", key)
		}
	}
}

// TestKnownKeys pins the keys that the struct tags give.
func TestKnownKeys(t *testing.T) {
	want := strings.Fields(`allmulti antiSpoof args bigTCP capabilities cluster cniVersion dataDir device dns egressBurst
		egressRate fastPath ingressBurst ingressPolicy ingressRate ipMasq ipMasq4 ipMasq6 ipam isDefaultGateway logFile logLevel masqTunnels maxFlows mtu name
		nonMasqueradeCIDRs policy policyMode policyUnknown prevResult promisc runtimeConfig sysctl txQLen type unshapedSubnets uplinks`)
	if got := keysOf(reflect.TypeFor[netConf]()); !slices.Equal(slices.Sorted(slices.Values(got)), want) {
		t.Errorf("known keys are %q, want %q", got, want)
	}
}
