package conformance

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// TestCtlAttachments lists a container with every property, one without addresses, and one that has vanished.
func TestCtlAttachments(t *testing.T) {
	h := newHost(t)
	h.wantCtl(t, 0, []string{"attachments"}, "nothing is loaded yet")
	full := with(with(withPort(dual("1.1.0"), 8080), "antiSpoof", false), "ingressPolicy", "isolated")
	full = with(with(full, "ingressRate", 100000000), "egressRate", 50000000)
	full = with(full, "args.cni.labels", list{object{"key": "app", "value": "web"}})
	full = with(with(full, "runtimeConfig.aliases", list{"web", "www"}), "runtimeConfig.cgroupPath", "/pods/c1")
	c1 := h.pod(t, "c1", full)
	r1 := c1.add(t)
	noIPAM := h.pod(t, "c2", with(with(single("1.1.0"), "ipam", absent), "name", "bare"))
	r2 := noIPAM.add(t)
	gone := h.pod(t, "gone", with(single("1.1.0"), "runtimeConfig.aliases", list{"old"}))
	r3 := gone.add(t)
	gone.vanish(t)

	address := func(r *types100.Result, i int) object {
		return object{"address": addresses(r)[i].String(), "gateway": r.IPs[i].Gateway.String(), "masqueraded": true}
	}
	port := func(any string, i int) object {
		return object{"protocol": "tcp", "hostAddress": any, "hostPort": 8080.0, "containerAddress": addresses(r1)[i].String(), "containerPort": 80.0}
	}
	want := list{
		object{"network": "bare", "containerID": "c2", "ifname": "eth0", "dead": false, "device": r2.Interfaces[0].Name,
			"mac": r2.Interfaces[1].Mac, "chained": false, "addresses": list{}, "hostPorts": list{}, "antiSpoof": true, "ingressPolicy": "open"},
		object{"network": "pods", "containerID": "c1", "ifname": "eth0", "dead": false, "device": r1.Interfaces[0].Name,
			"mac": r1.Interfaces[1].Mac, "chained": false, "addresses": list{address(r1, 0), address(r1, 1)},
			"hostPorts": list{port("0.0.0.0", 0), port("::", 1)}, "aliases": list{"web", "www"},
			"antiSpoof": false, "ingressPolicy": "isolated", "ingressRate": 100000000.0, "egressRate": 40000000.0,
			"cgroupPath": "/pods/c1", "labels": list{object{"key": "app", "value": "web"}}},
		object{"network": "pods", "containerID": "gone", "ifname": "eth0", "dead": true, "mac": r3.Interfaces[1].Mac,
			"chained": false, "addresses": list{address(r3, 0)}, "hostPorts": list{}, "aliases": list{"old"},
			"antiSpoof": true, "ingressPolicy": "open"},
	}
	h.wantCtl(t, 0, []string{"set", "pods/c1", "egressRate=40000000"})
	exit, stdout, stderr := h.ctl(t, "attachments", "-o", "json")
	var got list
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || exit != 0 {
		t.Fatalf("got exit code %d, %v: %s%s", exit, err, stdout, stderr)
	}
	for _, attachment := range got {
		if owner, _ := attachment.(object)["owner"].(string); len(owner) != 16 {
			t.Errorf("owner: got %q, want 16 digits", owner)
		}
		delete(attachment.(object), "owner")
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n%s\nwant\n%s", encode(t, got), encode(t, want))
	}
	h.wantCtl(t, 0, []string{"attachments"}, "NETWORK  CONTAINER  ", "\npods     c1 ", "\nbare     c2 ", "gone\n", r1.Interfaces[0].Name)
	h.wantCtl(t, 0, []string{"attachments", "old"}, "  containerID: gone\n  dead: true\n")
	h.wantCtl(t, 0, []string{"attachments", "web"}, "- addresses:\n", "  containerID: c1\n", addresses(r1)[1].String(), "  cgroupPath: /pods/c1\n")

	// The error names a damaged record, and the list still has the other attachments.
	files, err := filepath.Glob(filepath.Join(record.DefaultDir, "*", "*.json"))
	if err != nil || len(files) != 2 {
		t.Fatalf("records: got %q (%v), want 2", files, err)
	}
	whole, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(files[0], []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	exit, stdout, stderr = h.ctl(t, "attachments")
	if exit != 1 || !strings.Contains(stderr, files[0]) || !strings.Contains(stdout, "pods     c1 ") {
		t.Errorf("got exit code %d, stdout %q, stderr %q; want 1, the other container, %s", exit, stdout, stderr, files[0])
	}
	if err := os.WriteFile(files[0], whole, 0o600); err != nil {
		t.Fatal(err)
	}
	noIPAM.del(t)
	h.wantCtl(t, 0, []string{"attachments"}, "gone")
	h.gc(t, withKey(single("1.1.0"), currentKey, list{}))
	h.wantCtl(t, 0, []string{"attachments"}, "no container is connected")
	h.wantCtl(t, 0, []string{"attachments", "-o", "json"}, "[]\n")
}
