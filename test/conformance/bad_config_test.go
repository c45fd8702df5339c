package conformance

import (
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestBadConfig calls ADD with an invalid value of each key. The error must name the key and the value, and
// ADD must leave nothing. The unit tests of plugin/config and ipam have more rows of misspelled keys, ports and ranges.
func TestBadConfig(t *testing.T) {
	pipe := makePipe(t)
	wantRefused(t, []badValue{
		{"cniVersion", "9.0.0", codeIncompatible, []string{"9.0.0"}},
		{"cniVersion", 1, codeDecoding, []string{"cniVersion"}},
		{"name", absent, codeInvalidConfig, []string{"name"}},
		{"name", "", codeInvalidConfig, []string{"name"}},
		{"name", "a/b", codeInvalidConfig, []string{"name", "a/b"}},
		{"name", "-a", codeInvalidConfig, []string{"name", "-a"}},
		{"name", 1, codeDecoding, []string{"name"}},

		{"ipmask", true, codeUnsupported, []string{"ipmask", "true", "ipMasq"}},
		{"isDefaultGateway", "yes", codeInvalidConfig, []string{"isDefaultGateway", "yes", "true or false"}},
		{"ipMasq", "yes", codeInvalidConfig, []string{"ipMasq", "yes", "true or false"}},
		{"device", "macvlan", codeInvalidConfig, []string{"device", "macvlan", "netkit"}},
		{"bigTCP", "big", codeInvalidConfig, []string{"bigTCP", `"big"`, `"auto" or "never"`}},
		{"bigTCP", 196608, codeInvalidConfig, []string{"bigTCP", "196608", "auto"}},
		{"bigTCP", list{"auto"}, codeInvalidConfig, []string{"bigTCP", "auto", "never"}},
		{"fastPath", "fast", codeInvalidConfig, []string{"fastPath", "fast", "established", "never"}},
		{"ingressPolicy", "same-bridge", codeInvalidConfig, []string{"ingressPolicy", "same-bridge", "same-network", "isolated"}},
		{"policy", object{"egress": list{object{}, object{"ports": list{object{"port": 80, "endPort": 70}}}}}, codeInvalidConfig, []string{"policy.egress[1].ports[0].endPort: 70 is below port 80"}},
		{"policyMode", "log", codeInvalidConfig, []string{"policyMode", "log", "audit"}},
		{"args", object{"cni": object{"portSources": list{object{"hostPort": 8080, "sources": list{"10.0.0.1/8"}}}}}, codeInvalidConfig, []string{"args.cni.portSources[0].sources[0]", "10.0.0.1/8"}},
		{"args", object{"cni": object{"portSources": list{object{"hostPort": 8080}}}}, codeInvalidConfig, []string{"args.cni.portSources[0].sources"}},
		{"args", object{"cni": object{"portSources": list{object{"hostPort": 0, "sources": list{"10.0.0.0/8"}}}}}, codeInvalidConfig, []string{"args.cni.portSources[0].hostPort", "65535"}},
		{"args", object{"cni": object{"portSources": list{object{"hostPort": 1, "protocol": "icmp", "sources": list{"10.0.0.0/8"}}}}}, codeInvalidConfig, []string{"args.cni.portSources[0].protocol", "icmp"}},
		{"ingressRate", "fast", codeInvalidConfig, []string{"ingressRate", "fast", "a whole number"}},
		{"ingressRate", 100, codeInvalidConfig, []string{"ingressRate", "100", "8000"}},
		{"egressRate", -1, codeInvalidConfig, []string{"egressRate", "-1"}},
		{"egressBurst", 1000, codeInvalidConfig, []string{"egressBurst", "1000", "egressRate"}},
		{"unshapedSubnets", list{"10.0.0.1/8"}, codeInvalidConfig, []string{"unshapedSubnets[0]", "10.0.0.1/8"}},
		{"antiSpoof", "yes", codeInvalidConfig, []string{"antiSpoof", "yes", "true or false"}},
		{"ipMasq4", "yes", codeInvalidConfig, []string{"ipMasq4", "yes", "true or false"}},
		{"ipMasq6", 0, codeInvalidConfig, []string{"ipMasq6", "0", "true or false"}},
		{"masqTunnels", "yes", codeInvalidConfig, []string{"masqTunnels", "yes", "true or false"}},
		{"nonMasqueradeCIDRs", "10.0.0.0/8", codeInvalidConfig, []string{"nonMasqueradeCIDRs", "10.0.0.0/8", "list"}},
		{"nonMasqueradeCIDRs", list{"10.0.0.0/8", "10.0.0.1/8"}, codeInvalidConfig, []string{"nonMasqueradeCIDRs[1]", "10.0.0.1/8", "fd00::/8"}},
		{"nonMasqueradeCIDRs", list{"10.0.0.1"}, codeInvalidConfig, []string{"nonMasqueradeCIDRs[0]", "10.0.0.1"}},
		{"nonMasqueradeCIDRs", list{"fd00::/129"}, codeInvalidConfig, []string{"nonMasqueradeCIDRs[0]", "fd00::/129"}},
		{"maxFlows", 1023, codeInvalidConfig, []string{"maxFlows", "1023", "1024"}},
		{"maxFlows", -1, codeInvalidConfig, []string{"maxFlows", "-1", "1024"}},
		{"maxFlows", 1 << 25, codeInvalidConfig, []string{"maxFlows", "33554432", "16777216"}},
		{"mtu", -1, codeInvalidConfig, []string{"mtu", "-1", "68"}},
		{"mtu", 65536, codeInvalidConfig, []string{"mtu", "65536", "65535"}},
		{"mtu", 1279, codeInvalidConfig, []string{"mtu", "1279", "1280"}}, // RFC 8200, with an IPv6 range
		{"mtu", 1500.5, codeInvalidConfig, []string{"mtu", "1500.5"}},
		{"mtu", "1500", codeInvalidConfig, []string{"mtu", `"1500"`, "whole number"}},
		{"uplinks", "eth0", codeInvalidConfig, []string{"uplinks", "eth0", "list"}},
		{"uplinks", list{}, codeInvalidConfig, []string{"uplinks", "[]", "one name"}},
		{"uplinks", list{"eth0", "eth["}, codeInvalidConfig, []string{"uplinks[1]", "eth[", "eth*"}},
		{"uplinks", list{""}, codeInvalidConfig, []string{"uplinks[0]", `""`, "eth*"}},
		{"logFile", "ebpfnet.log", codeInvalidConfig, []string{"logFile", "ebpfnet.log", "absolute"}},
		{"logFile", pipe, codeInvalidConfig, []string{"logFile", pipe, "regular file"}},
		{"logFile", "/dev/null", codeInvalidConfig, []string{"logFile", "/dev/null", "regular file"}},
		{"logFile", "/run", codeInvalidConfig, []string{"logFile", `"/run"`, "regular file"}},
		{"logFile", true, codeInvalidConfig, []string{"logFile", "true", "a string"}},
		{"logLevel", "loud", codeInvalidConfig, []string{"logLevel", "loud", "debug, error, info, warn"}},
		{"logLevel", 7, codeInvalidConfig, []string{"logLevel", "7", "a string"}},
		{"dataDir", "ebpfnet", codeInvalidConfig, []string{"dataDir", `"ebpfnet"`, "absolute"}},
		{"ipam.dataDir", "networks", codeInvalidConfig, []string{"ipam.dataDir", `"networks"`, "absolute"}},
		{"dns", "192.0.2.53", codeInvalidConfig, []string{"dns", "192.0.2.53"}},
		{"dns.nameservers", "192.0.2.53", codeInvalidConfig, []string{"dns.nameservers", "192.0.2.53"}},
		{"args", "IP=10.88.0.9", codeInvalidConfig, []string{"args", "IP=10.88.0.9"}},
		{"args.cni.ips", "10.88.0.9", codeInvalidConfig, []string{"args.cni.ips", "10.88.0.9"}},
		{"args.cni.mac", "02:00", codeInvalidConfig, []string{"args.cni.mac", "02:00"}},
		{"prevResult", object{"cniVersion": "1.1.0", "interfaces": list{object{"name": "eth0", "sandbox": "/run/netns/c1"}}}, codeUnsupported, []string{"prevResult", "eth0"}},
		{"prevResult", "none", codeInvalidConfig, []string{"prevResult", "none"}},
	})
}

// badValue is a value of a key that ADD refuses.
type badValue struct {
	path  string
	value any
	code  uint
	words []string // of the error
}

// wantRefused calls ADD with each of the values, and wants it to leave nothing.
func wantRefused(t *testing.T, values []badValue) {
	t.Helper()
	h := newLoadedHost(t)
	p := h.pod(t, "c1", dual("1.1.0"))
	before := h.snapshot(t, p.Namespace)
	for _, bad := range values {
		t.Run(bad.path+" "+string(encode(t, bad.value)), func(t *testing.T) {
			p.conf = with(dual("1.1.0"), bad.path, bad.value)
			wantError(t, p.try(t, "ADD"), bad.code, bad.words...)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// makePipe returns the path of a pipe without a reader.
func makePipe(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pipe")
	testenv.Must(t, unix.Mkfifo(path, 0o600))
	return path
}

// TestBadRuntimeConfig is TestBadConfig for runtimeConfig.
func TestBadRuntimeConfig(t *testing.T) {
	port := func(key string, value any) list {
		return list{object{"hostPort": 80, "containerPort": 80}, with(object{"hostPort": 8080, "containerPort": 80}, key, value)}
	}
	const second = "portMappings[1]."
	wantRefused(t, []badValue{
		{"runtimeConfig.portMappings", "80:80", codeInvalidConfig, []string{"portMappings", "80:80"}},
		{"runtimeConfig.portMappings", port("hostPort", absent), codeInvalidConfig, []string{second + "hostPort"}},
		{"runtimeConfig.portMappings", port("hostPort", -1), codeInvalidConfig, []string{second + "hostPort", "-1"}},
		{"runtimeConfig.portMappings", port("hostPort", "81"), codeInvalidConfig, []string{"portMappings", "hostPort", `"81"`}},
		{"runtimeConfig.portMappings", port("containerPort", 65536), codeInvalidConfig, []string{second + "containerPort", "65536"}},
		{"runtimeConfig.portMappings", port("protocol", 6), codeInvalidConfig, []string{"portMappings", "protocol", "6"}},
		{"runtimeConfig.portMappings", port("hostIP", "192.0.2.1/24"), codeInvalidConfig, []string{second + "hostIP", "192.0.2.1/24"}},
		{"runtimeConfig.portMappings", list{object{"hostPort": 80, "containerPort": 80}, object{"hostPort": 80, "containerPort": 80, "protocol": "TCP", "hostIP": "0.0.0.0"}},
			codeInvalidConfig, []string{second + "hostPort", "80", "once"}},
		{"runtimeConfig.deviceID", "0000:00:01.0", codeUnsupported, []string{"runtimeConfig.deviceID", "0000:00:01.0"}},
		{"runtimeConfig.infinibandGUID", "c2:11:22:33:44:55:66:77", codeUnsupported, []string{"runtimeConfig.infinibandGUID", "c2:11"}},
		{"runtimeConfig.mac", "02:00:00:00:00", codeInvalidConfig, []string{"runtimeConfig.mac", "02:00:00:00:00"}},
		{"runtimeConfig.mac", "03:00:00:00:00:01", codeInvalidConfig, []string{"runtimeConfig.mac", "03:00:00:00:00:01", "unicast"}},
		{"runtimeConfig.mac", "00:00:00:00:00:00", codeInvalidConfig, []string{"runtimeConfig.mac", "00:00:00:00:00:00"}},
		{"runtimeConfig.mac", "02:00:00:00:00:00:00:01", codeInvalidConfig, []string{"runtimeConfig.mac", "02:00:00:00:00:00:00:01"}},
		{"runtimeConfig.mac", 2, codeInvalidConfig, []string{"runtimeConfig.mac", "2"}},
		{"runtimeConfig.ips", "10.88.0.9", codeInvalidConfig, []string{"runtimeConfig.ips", "10.88.0.9"}},
		{"runtimeConfig.ipRanges", "10.87.0.0/16", codeInvalidConfig, []string{"runtimeConfig.ipRanges", "10.87.0.0/16"}},
		{"runtimeConfig.ipRanges", list{list{object{"subnet": "10.88.0.0/24"}}}, codeInvalidConfig, []string{"ipam.ranges[0][0]", "overlaps"}},
		{"runtimeConfig.dns", "192.0.2.53", codeInvalidConfig, []string{"runtimeConfig.dns", "192.0.2.53"}},
	})
}
