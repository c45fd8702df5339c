package conflist

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"
)

var dual = []netip.Prefix{netip.MustParsePrefix("10.244.1.0/24"), netip.MustParsePrefix("fd44:1::/64")}

// TestFill keeps what an operator has written, and adds what is the node's.
func TestFill(t *testing.T) {
	for _, test := range []struct {
		name, template string
		podCIDRs       []netip.Prefix
		mtu            int
		want           string
	}{
		{"default, dual stack", string(Default), dual, 1450, `{"cniVersion": "1.1.0", "name": "pods", "plugins": [
			{"type": "ebpfnet", "ipMasq": true, "capabilities": {"portMappings": true, "bandwidth": true}, "mtu": 1450, "bigTCP": "never", "cluster": "/run/n.json",
			 "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.1.0/24"}], [{"subnet": "fd44:1::/64"}]],
			          "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}}]}`},
		{"IPv6 only, direct", `{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "ebpfnet", "ipam": {}}]}`, dual[1:], 0,
			`{"cniVersion": "1.0.0", "name": "n", "plugins": [{"type": "ebpfnet", "cluster": "/run/n.json",
			 "ipam": {"type": "host-local", "ranges": [[{"subnet": "fd44:1::/64"}]], "routes": [{"dst": "::/0"}]}}]}`},
		{"an operator's keys", `{"cniVersion": "1.1.0", "name": "n", "disableGC": true, "plugins": [{"type": "ebpfnet", "mtu": 1300, "bigTCP": "auto",
			"nonMasqueradeCIDRs": ["10.0.0.0/8"], "ipam": {"type": "host-local", "dataDir": "/run/x", "routes": [{"dst": "10.0.0.0/8"}]}},
			{"type": "tuning"}]}`, dual[:1], 1450,
			`{"cniVersion": "1.1.0", "name": "n", "disableGC": true, "plugins": [{"type": "ebpfnet", "mtu": 1300, "bigTCP": "auto", "cluster": "/run/n.json",
			"nonMasqueradeCIDRs": ["10.0.0.0/8"], "ipam": {"type": "host-local", "dataDir": "/run/x", "routes": [{"dst": "10.0.0.0/8"}],
			"ranges": [[{"subnet": "10.244.1.0/24"}]]}}, {"type": "tuning"}]}`},
	} {
		filled, err := Fill([]byte(test.template), Node{test.podCIDRs, test.mtu, test.mtu != 0, "/run/n.json"})
		if err != nil {
			t.Errorf("%s: %v", test.name, err)
			continue
		}
		if got, want := decoded(t, string(filled)), decoded(t, test.want); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %v, want %v", test.name, got, want)
		}
	}
}

// TestFillRefuses names the key, what it is and what is expected.
func TestFillRefuses(t *testing.T) {
	for template, want := range map[string]string{
		`{`:                                   "read the template of the conflist",
		`{"name": "n"}`:                       "plugins of the template: got none, want an array of objects",
		`{"name": "n", "plugins": "ebpfnet"}`: `plugins of the template: got "ebpfnet", want an array of objects`,
		`{"plugins": [{"type": "ebpfnet"}]}`:  "name of the template",
		`{"name": "n", "plugins": [{"type": "bridge"}]}`:                                                          `got 0 of type "ebpfnet", want one`,
		`{"name": "n", "plugins": [{"type": "ebpfnet"}, {"type": "ebpfnet"}]}`:                                    `got 2 of type "ebpfnet", want one`,
		`{"name": "n", "plugins": [{"type": "ebpfnet", "ipam": []}]}`:                                             "ipam of the template: got [], want an object",
		`{"name": "n", "plugins": [{"type": "ebpfnet", "ipam": {"type": 1}}]}`:                                    `type of the template: got 1, want "host-local"`,
		`{"name": "n", "plugins": [{"type": "ebpfnet", "ipam": {"type": "x"}}]}`:                                  `ipam.type of the template: got "x", want "host-local"`,
		`{"name": "n", "plugins": [{"type": "ebpfnet", "ipam": {"type": "host-local", "subnet": "10.0.0.0/8"}}]}`: `ipam.subnet of the template: got "10.0.0.0/8", want none`,
	} {
		if _, err := Fill([]byte(template), Node{PodCIDRs: dual}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got error %v, want %q", template, err, want)
		}
	}
	if _, err := Fill(Default, Node{}); err == nil {
		t.Error("without podCIDRs: got no error, want one")
	}
}

// TestMaxFlows is for a datapath that is loaded before the first container.
func TestMaxFlows(t *testing.T) {
	const template = `{"name": "n", "plugins": [{"type": "ebpfnet"%s}]}`
	for keys, want := range map[string]uint32{"": 0, `, "maxFlows": 65536`: 65536} {
		if got, err := MaxFlows(fmt.Appendf(nil, template, keys)); err != nil || got != want {
			t.Errorf("keys %q: got %d (%v), want %d", keys, got, err, want)
		}
	}
	for _, keys := range []string{`, "maxFlows": -1`, `, "maxFlows": "many"`, `}, {"type": "ebpfnet"`} {
		if got, err := MaxFlows(fmt.Appendf(nil, template, keys)); err == nil {
			t.Errorf("keys %q: got %d, want an error", keys, got)
		}
	}
}

func decoded(t *testing.T, text string) (value any) {
	t.Helper()
	if err := json.Unmarshal([]byte(text), &value); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return value
}
