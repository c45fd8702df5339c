package config

import (
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/skel"
	cnitypes "github.com/containernetworking/cni/pkg/types"
)

// refusalCodes are the codes of a configuration or environment that is refused.
var refusalCodes = []uint{
	cnitypes.ErrUnsupportedField, cnitypes.ErrInvalidEnvironmentVariables, cnitypes.ErrDecodingFailure, cnitypes.ErrInvalidNetworkConfig,
}

// wantRefusal requires an error with one of these codes and a message.
func wantRefusal(t *testing.T, err error) {
	t.Helper()
	var coded *cnitypes.Error
	if !errors.As(err, &coded) || !slices.Contains(refusalCodes, coded.Code) || coded.Msg == "" {
		t.Fatalf("refused by %#v", err)
	}
}

// FuzzConfig checks that a configuration is refused with a code or within its limits, and that DEL
// finds what ADD accepts.
func FuzzConfig(f *testing.F) {
	for _, keys := range [][]string{
		{},
		{`"ipMasq": true, "ipMasq6": false, "nonMasqueradeCIDRs": ["10.0.0.0/8", "fd00::/8"], "masqTunnels": true`},
		{`"mtu": 1400, "maxFlows": 2048, "device": "auto", "uplinks": ["eth*"], "logFile": "/l", "logLevel": "debug", "dataDir": "/d"`},
		{`"fastPath": "always", "antiSpoof": false, "ingressPolicy": "isolated"`},
		{`"policy": {"egress": [{"to": [{"cidr": "10.0.0.0/8"}], "ports": [{"port": 80}]}]}, "policyMode": "audit"`},
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
	f.Add([]byte(`{"": {}}`))
	f.Fuzz(func(t *testing.T, stdin []byte) {
		call, err := NewCall(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", StdinData: stdin})
		if err != nil {
			wantRefusal(t, err)
			return
		}
		_ = call.CNIVersion()
		_, _, _ = call.Log()
		if valid, err := call.ParseValidAttachments(); err == nil && valid != nil && valid.Network != call.Network() {
			t.Errorf("attachments of network %q", valid.Network)
		}
		config, err := call.Parse()
		if err != nil {
			wantRefusal(t, err)
			return
		}
		checkLimits(t, config)
		release, err := call.ParseForRelease()
		if err != nil {
			t.Fatalf("ADD accepts what DEL does not: %v", err)
		}
		if release.Attachment != config.Attachment || release.DataDir != config.DataDir {
			t.Errorf("ADD works on %v in %s, DEL on %v in %s", config.Attachment, config.DataDir, release.Attachment, release.DataDir)
		}
		if config.IPAM != nil && (release.IPAM == nil || release.IPAM.Dir() != config.IPAM.Dir()) {
			t.Errorf("ADD reserves in %s, DEL releases in %+v", config.IPAM.Dir(), release.IPAM)
		}
		if config.Delegate != release.Delegate {
			t.Errorf("ADD delegates to %q, DEL to %q", config.Delegate, release.Delegate)
		}
	})
}

func checkLimits(t *testing.T, c *Config) {
	t.Helper()
	if c.MTU != 0 && (c.MTU < 68 || c.MTU > 65535) || c.MaxFlows > 1<<24 {
		t.Errorf("MTU %d, %d flows", c.MTU, c.MaxFlows)
	}
	checkMAC(t, c.MAC)
	for _, port := range c.HostPorts {
		if port.HostPort == 0 || port.ContainerPort == 0 || port.HostAddr.Zone() != "" || port.HostAddr.Is4In6() {
			t.Errorf("port %+v", port)
		}
	}
	for _, prefix := range c.Masq.NonMasq {
		if prefix != prefix.Masked() || prefix.Addr().Is4In6() {
			t.Errorf("non-masquerade CIDR %s", prefix)
		}
	}
	for name := range c.Tuning.Sysctls {
		if strings.HasPrefix(name, "/") || slices.Contains(strings.Split(name, "/"), "..") {
			t.Errorf("sysctl %s is outside of net", name)
		}
	}
	if c.IPAM != nil && c.Delegate != "" {
		t.Error("two IPAM plugins")
	}
}

func checkMAC(t *testing.T, mac net.HardwareAddr) {
	t.Helper()
	if mac != nil && (len(mac) != 6 || mac[0]&1 != 0) {
		t.Errorf("MAC is %s", mac)
	}
}

// FuzzArgs combines CNI_ARGS with a valid configuration.
func FuzzArgs(f *testing.F) {
	for _, args := range []string{
		"", "IgnoreUnknown=1;FOO=bar", "FOO=bar", "IP=10.88.0.7;MAC=02:00:00:00:00:01;GATEWAY=10.88.0.1", "IP=10.88.0.7/16,", "IP", ";", "=",
		"IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=1;K8S_POD_INFRA_CONTAINER_ID=c1", "IgnoreUnknown=maybe", "MAC=02:00=1",
	} {
		f.Add(args)
	}
	f.Fuzz(func(t *testing.T, args string) {
		config, err := parse(&skel.CmdArgs{ContainerID: "c1", IfName: "eth0", Args: args, StdinData: confWith()})
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
