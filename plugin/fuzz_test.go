package plugin

import (
	"bytes"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	cniversion "github.com/containernetworking/cni/pkg/version"
)

// allowedCodes are what a configuration, and the environment, may be told.
var allowedCodes = []uint{
	cnitypes.ErrUnsupportedField, cnitypes.ErrInvalidEnvironmentVariables, cnitypes.ErrDecodingFailure, cnitypes.ErrInvalidNetworkConfig,
}

// wantRefusal wants an error of parsing to have one of the codes for that, and words.
func wantRefusal(t *testing.T, err error) {
	t.Helper()
	var coded *cnitypes.Error
	if !errors.As(err, &coded) || !slices.Contains(allowedCodes, coded.Code) || coded.Msg == "" {
		t.Fatalf("refused by %#v", err)
	}
}

// FuzzConfig checks that a configuration is refused with a code, or is in its limits; and that what
// ADD accepts, DEL finds again.
func FuzzConfig(f *testing.F) {
	for _, keys := range [][]string{
		{},
		{`"ipMasq": true, "ipMasq6": false, "nonMasqueradeCIDRs": ["10.0.0.0/8", "fd00::/8"]`},
		{`"mtu": 1400, "maxFlows": 2048, "device": "auto", "uplinks": ["eth*"], "logFile": "/l", "logLevel": "debug", "dataDir": "/d"`},
		{`"fastPath": "always", "antiSpoof": false, "ingressPolicy": "isolated"`},
		{`"sysctl": {"net.ipv4.conf.IFNAME.arp_notify": "1"}, "promisc": true, "allmulti": false, "txQLen": 7`},
		{`"runtimeConfig": {"portMappings": [{"hostPort": 80, "containerPort": 80, "protocol": "udp", "hostIP": "::1"}], "ips": ["10.88.0.7"], "mac": "02:00:00:00:00:01"}`},
		{`"runtimeConfig": {"dns": {"servers": ["192.0.2.53"]}, "aliases": ["web"], "cgroupPath": "/a", "ipRanges": [[{"subnet": "10.89.0.0/16"}]]}`},
		{`"args": {"cni": {"ips": ["10.88.0.8/16"], "mac": "02:00:00:00:00:02", "labels": [{"key": "app", "value": "web"}]}}`},
		{`"cni.dev/attachments": [{"containerID": "c1", "ifname": "eth0"}], "cni.dev/valid-attachments": null`},
	} {
		f.Add(confWith(keys...))
	}
	f.Add([]byte(`{"name": "pods", "ipam": {"type": "static", "addresses": [{"address": "10.88.0.7/24"}]}}`))
	f.Add([]byte(`{"name": "pods", "ipam": {}}`))
	f.Add([]byte(`{"name": "po`))
	f.Fuzz(func(t *testing.T, stdin []byte) {
		_ = versionOf(stdin)
		call := &skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: stdin}
		if valid, err := validAttachments(stdin, "pods", nil); err == nil && valid != nil && valid.network != "pods" {
			t.Errorf("attachments of network %q", valid.network)
		}
		config, err := parseConfig(call)
		if err != nil {
			wantRefusal(t, err)
			return
		}
		checkLimits(t, config)
		release, err := parseForRelease(call)
		if err != nil {
			t.Fatalf("ADD accepts what DEL does not: %v", err)
		}
		if release.Attachment != config.Attachment || release.DataDir != config.DataDir {
			t.Errorf("ADD works on %v in %s, DEL on %v in %s", config.Attachment, config.DataDir, release.Attachment, release.DataDir)
		}
		if config.IPAM != nil && (release.IPAM == nil || release.IPAM.Dir() != config.IPAM.Dir()) {
			t.Errorf("ADD reserves in %s, DEL releases in %+v", config.IPAM.Dir(), release.IPAM)
		}
		if (config.Delegate == nil) != (release.Delegate == nil) || config.Delegate != nil && config.Delegate.kind != release.Delegate.kind {
			t.Errorf("ADD delegates to %+v, DEL to %+v", config.Delegate, release.Delegate)
		}
	})
}

func checkLimits(t *testing.T, c *Config) {
	t.Helper()
	if c.MTU != 0 && (c.MTU < 68 || c.MTU > 65535) || c.MaxFlows > 1<<24 {
		t.Errorf("MTU %d, %d flows", c.MTU, c.MaxFlows)
	}
	checkMAC(t, c.MAC)
	for _, port := range c.Ports {
		if port.HostPort == 0 || port.Port == 0 || port.HostAddr.Zone() != "" || port.HostAddr.Is4In6() {
			t.Errorf("port %+v", port)
		}
	}
	for _, exempt := range c.Masq.Exempt {
		if exempt != exempt.Masked() || exempt.Addr().Is4In6() {
			t.Errorf("exempt is %s", exempt)
		}
	}
	for name := range c.Tuning.Sysctls {
		if strings.HasPrefix(name, "/") || slices.Contains(strings.Split(name, "/"), "..") {
			t.Errorf("sysctl %s is outside of net", name)
		}
	}
	if c.IPAM != nil && c.Delegate != nil {
		t.Error("two IPAM plugins")
	}
}

func checkMAC(t *testing.T, mac net.HardwareAddr) {
	t.Helper()
	if mac != nil && (len(mac) != 6 || mac[0]&1 != 0) {
		t.Errorf("MAC is %s", mac)
	}
}

// FuzzArgs gives CNI_ARGS to a good configuration.
func FuzzArgs(f *testing.F) {
	for _, args := range []string{
		"", "IgnoreUnknown=1;FOO=bar", "FOO=bar", "IP=10.88.0.7;MAC=02:00:00:00:00:01;GATEWAY=10.88.0.1", "IP=10.88.0.7/16,", "IP", ";", "=",
		"IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=1;K8S_POD_INFRA_CONTAINER_ID=c1", "IgnoreUnknown=maybe", "MAC=02:00=1",
	} {
		f.Add(args)
	}
	f.Fuzz(func(t *testing.T, args string) {
		config, err := parseConfig(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Args: args, StdinData: confWith()})
		if err != nil {
			wantRefusal(t, err)
			if !strings.Contains(err.Error(), "CNI_ARGS") {
				t.Errorf("the error is not of CNI_ARGS: %v", err)
			}
			return
		}
		checkMAC(t, config.MAC)
		for _, addr := range config.IPAM.Requested {
			if addr.IsValid() && !config.IPAM.Ranges[0][0].Subnet.Contains(addr) {
				t.Errorf("%s is of no range", addr)
			}
		}
	})
}

// FuzzPrevResult gives results to a chained ADD, which passes them on as they are, and to CHECK.
func FuzzPrevResult(f *testing.F) {
	const whole = `"interfaces": [{"name": "cni0", "mac": "02:00:00:00:00:01"}, {"name": "eth0", "sandbox": "/run/netns/a", "mac": "02:00:00:00:00:02"}],
		"routes": [{"dst": "0.0.0.0/0", "gw": "10.88.0.1", "priority": 7, "table": 100, "scope": 0}], "dns": {"nameservers": ["192.0.2.53"]}`
	for _, seed := range []struct{ version, result string }{
		{"1.1.0", `{"cniVersion": "1.1.0", ` + whole + `, "ips": [{"interface": 1, "address": "10.88.0.7/16", "gateway": "10.88.0.1"}]}`},
		{"0.4.0", `{"cniVersion": "0.4.0", ` + whole + `, "ips": [{"version": "6", "interface": 1, "address": "fd00::7/64"}]}`},
		{"0.2.0", `{"cniVersion": "0.2.0", "ip4": {"ip": "10.88.0.7/16", "gateway": "10.88.0.1", "routes": [{"dst": "0.0.0.0/0"}]}}`},
		{"1.0.0", `{"cniVersion": "1.0.0", "interfaces": [null], "ips": [null], "routes": [null]}`},
		{"1.0.0", `{"cniVersion": "1.0.0", "ips": [{"interface": -1, "address": "::ffff:10.88.0.7/120"}, {"interface": 9, "address": "0.0.0.0/0"}]}`},
		{"0.4.0", `{"cniVersion": "0.4.0", "routes": [{}]}`},
		{"0.3.0", `{"cniVersion": "0.3.0", "ips": [{"version": "4"}]}`},
		{"1.0.0", `{}`}, {"1.0.0", `null`}, {"9.0.0", `{"cniVersion": "9.0.0"}`},
	} {
		f.Add(seed.version, seed.result)
	}
	f.Fuzz(func(t *testing.T, version, result string) {
		quoted, err := json.Marshal(version)
		if err != nil || !json.Valid([]byte(result)) || !slices.Contains(cniversion.All.SupportedVersions(), version) {
			t.Skip() // the library asks before us, and the text would not be the configuration's
		}
		stdin := []byte(`{"cniVersion": ` + string(quoted) + `, "name": "pods", "type": "ebpfnet", "prevResult": ` + result + `}`)
		config, err := parseConfig(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: stdin})
		if err != nil {
			wantRefusal(t, err)
			return
		}
		if config.PrevResult == nil || checkChained(config) != nil {
			return
		}
		a := &addition{Plugin: &Plugin{Log: slog.New(slog.DiscardHandler)}, config: config}
		_ = interfaceOf(config.PrevResult, "eth0")
		(&inspection{config: config}).expect()
		checkPassedOn(t, a, version, stdin)
	})
}

// checkPassedOn prints the result as ADD does, and reads it again.
func checkPassedOn(t *testing.T, a *addition, version string, stdin []byte) {
	t.Helper()
	var out bytes.Buffer
	a.Stdout = &out
	if err := a.print(t.Context()); err != nil {
		return // more than this version can say
	}
	var conf map[string]json.RawMessage
	if err := json.Unmarshal(stdin, &conf); err != nil {
		t.Fatal(err)
	}
	conf["prevResult"] = out.Bytes()
	text, err := json.Marshal(conf)
	if err != nil {
		t.Fatalf("ADD prints %s: %v", &out, err)
	}
	again, err := parseConfig(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: text})
	if err != nil {
		t.Fatalf("ADD prints what the next plugin refuses: %v: %s", err, &out)
	}
	if got, want := asJSON(t, again.PrevResult, version), asJSON(t, a.config.PrevResult, version); !reflect.DeepEqual(got, want) {
		t.Errorf("passed on as %s, was %s", got, want)
	}
}

func asJSON(t *testing.T, result *types100.Result, version string) string {
	t.Helper()
	var out bytes.Buffer
	if err := (*types100.Result)(result).PrintTo(&out); err != nil {
		t.Fatalf("print a result of version %s: %v", version, err)
	}
	return out.String()
}
