package main

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// TestExample requires that the README shows the example that the demo runs.
func TestExample(t *testing.T) {
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), "```json\n"+example+"```\n") {
		t.Error("README.md has no json block that equals example.conflist")
	}
}

// TestExamples requires that the examples for runtimes differ from the README's in what these runtimes support, and in
// nothing else.
func TestExamples(t *testing.T) {
	files, err := filepath.Glob("examples/*.conflist")
	if err != nil || len(files) == 0 {
		t.Fatalf("find the examples: got %q, %v", files, err)
	}
	want := withoutRuntime(t, "example.conflist")
	for _, file := range files {
		if got := withoutRuntime(t, file); !reflect.DeepEqual(got, want) {
			t.Errorf("%s without version and capabilities: got %v, want %v as in example.conflist", file, got, want)
		}
	}
}

// withoutRuntime returns a configuration without the keys that depend on the runtime.
func withoutRuntime(t *testing.T, file string) map[string]any {
	t.Helper()
	content, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var list map[string]any
	if err := json.Unmarshal(content, &list); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	delete(list, "cniVersion")
	delete(list["plugins"].([]any)[0].(map[string]any), "capabilities")
	return list
}

// TestExampleSubnets wants subnets that no well-known tool uses by default: two of them would give out the same address.
func TestExampleSubnets(t *testing.T) {
	var list struct {
		Plugins []struct {
			IPAM struct {
				Ranges [][]struct{ Subnet netip.Prefix }
			}
		}
	}
	if err := json.Unmarshal([]byte(example), &list); err != nil {
		t.Fatal(err)
	}
	for tool, taken := range map[string]string{
		"LXC, libslirp": "10.0.0.0/14", "nerdctl": "10.4.0.0/16", "OpenVPN": "10.8.0.0/16", "Weave": "10.32.0.0/12",
		"k3s": "10.42.0.0/15", "CRI-O": "10.85.0.0/16", "podman": "10.88.0.0/16", "podman's networks": "10.89.0.0/16",
		"podman's later networks": "10.90.0.0/15", "the others of podman": "10.92.0.0/14", "kubeadm's services": "10.96.0.0/11",
		"Google Cloud, OpenShift, flannel": "10.128.0.0/9", "Docker": "172.16.0.0/12", "libvirt, Calico, home routers": "192.168.0.0/16",
		"shared address space": "100.64.0.0/10", "benchmarks": "198.18.0.0/15", "link-local": "169.254.0.0/16",
		"kind's IPv6": "fd00:10::/32", "link-local IPv6": "fe80::/10",
	} {
		for _, set := range list.Plugins[0].IPAM.Ranges {
			if subnet := set[0].Subnet; subnet.Overlaps(netip.MustParsePrefix(taken)) {
				t.Errorf("%s overlaps %s of %s", subnet, taken, tool)
			}
		}
	}
}
