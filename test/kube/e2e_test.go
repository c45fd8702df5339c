package kube

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// area are Kubernetes' tests of what the network of a cluster does. Not from the start of a line: for ginkgo the name of
// the suite comes first.
const area = `\[sig-network\] (Networking|Services|HostPort|NoSNAT|Conntrack|Connectivity Pod Lifecycle|Netpol|\[Feature:IPv6DualStack\])`

// class is a class of tests that ask for what these clusters have not.
type class struct{ tests, reason string }

func leftOut() []class {
	classes := []class{
		{`\[Feature:Networking-(IPv4|IPv6|DNS)\]`, "asks servers in the Internet"},
		{`\[Feature:SCTPConnectivity\]`, "the kernel has no SCTP"},
		{`\[Feature:Networking-Performance\]`, "measures; see test/bench"},
		{`\[Disruptive\]`, "logs in to nodes by SSH, or deletes kube-proxy and the API server as pods"},
		{`endpoints for unready pods`, "asks a pod by the API server's proxy, whose host here is no node"},
		{`SCTP HostPort`, "ebpfnet refuses host ports of SCTP"},
		{`ExternalTrafficPolicy changes`, "wants the node's address, and kube-proxy masquerades with that of the tunnel's device"},
	}
	if len(families) == 1 {
		classes = append(classes, class{`\[Feature:IPv6DualStack\]`, "the cluster has one family"})
	}
	return classes
}

// reasonLeftOut returns why a test cannot run here, or "".
func reasonLeftOut(test string) string {
	for _, class := range leftOut() {
		if regexp.MustCompile(class.tests).MatchString(test) {
			return class.reason
		}
	}
	return ""
}

// TestE2E runs Kubernetes' own tests of networking.
func TestE2E(t *testing.T) {
	c := newCluster(t)
	for _, n := range c.nodes {
		n.disableKubeletRule()
	}
	c.startKubernetes(e2eImages(t)...)
	c.startDNS()
	c.startAgents()
	output, err := os.Create(filepath.Join(c.logs(), "e2e.txt"))
	testenv.Must(t, err)
	defer output.Close()
	// Most of a test is waiting for pods. Ginkgo runs those alone that must be.
	const perCPU, most = 2, 8
	const results = "e2e.json"
	cmd := c.ns.Command(context.Background(), binary(t, "ginkgo"), "--procs="+strconv.Itoa(min(perCPU*runtime.NumCPU(), most)), "--no-color",
		"--timeout=85m", "--output-dir="+c.dir, "--json-report="+results, "--focus="+focus(), "--skip="+skip(), binary(t, "e2e.test"), "--",
		"--kubeconfig="+c.admin, "--kubectl-path="+binary(t, "kubectl"), "--provider=skeleton", "--num-nodes=3")
	cmd.Stdout, cmd.Stderr = output, output
	runErr := cmd.Run()
	tests, err := readResults(filepath.Join(c.dir, results))
	if err != nil {
		t.Fatalf("%v, %v: see %s", runErr, err, output.Name())
	}
	tests.check(t)
	for _, n := range c.nodes {
		n.wantNoRouteLocalnet()
	}
	t.Logf("%v: see %s", runErr, output.Name())
	testenv.Must(t, os.WriteFile(filepath.Join(c.logs(), "e2e.md"), []byte(tests.markdown()), 0o644))
}

// disableKubeletRule keeps the kubelet from its iptables rule, which drops packets from the node's address to 127.0.0.1
// before a program of ours sees them: the test of host ports sends such.
func (n *node) disableKubeletRule() {
	n.t.Helper()
	n.run("sh", "-c", "echo makeIPTablesUtilChains: false >>"+kubeletConfigPath)
}

// wantNoRouteLocalnet wants the kernel to refuse packets from outside to 127.0.0.1. Where somebody has allowed them, the
// kubelet's rule is needed.
func (n *node) wantNoRouteLocalnet() {
	n.t.Helper()
	if settings := n.run("sh", "-c", "grep -H . /proc/sys/net/ipv4/conf/*/route_localnet"); strings.Contains(settings, ":1") {
		n.t.Errorf("%s: got %s, want 0 for all devices", n.Name, settings)
	}
}

// focus is the expression of the tests to run.
func focus() string {
	if *e2eFocus != "" {
		return *e2eFocus
	}
	return area
}

// skip is the expression of those left out.
func skip() string {
	var classes []string
	for _, class := range leftOut() {
		classes = append(classes, class.tests)
	}
	return strings.Join(classes, "|")
}

// e2eImages are images with the names that Kubernetes' tests ask for. Where those have more, they say what is missing.
func e2eImages(t *testing.T) (images []image) {
	t.Helper()
	output, err := exec.Command(binary(t, "e2e.test"), "--list-images").Output()
	testenv.Must(t, err)
	files := map[string]string{"agnhost": binary(t, "agnhost")}
	for _, name := range applets(t) {
		files["bin/"+name] = busybox
	}
	for _, name := range []string{"dash", "curl", "wget", "ss", "nc.openbsd"} {
		maps.Copy(files, withLibraries(t, name))
	}
	files["bin/sh"], files["bin/nc"] = files["usr/bin/dash"], files["usr/bin/nc.openbsd"] // busybox's have fewer options
	files["bin/wget"] = files["usr/bin/wget"]                                             // busybox's, a static program of glibc, crashes
	contents := map[string]image{
		"agnhost": {"", []string{"/agnhost"}, files, []string{"pause"}},
		"pause":   {"", []string{"/pause"}, map[string]string{"pause": binary(t, "pause")}, nil},
		"busybox": {"", []string{"/bin/sh"}, map[string]string{"bin/sh": busybox}, nil},
		"regression-issue-74839": {"", []string{"/regression-issue-74839"}, map[string]string{
			"regression-issue-74839": binary(t, "regression-issue-74839"),
		}, nil},
	}
	missing := maps.Clone(contents)
	for name := range strings.FieldsSeq(string(output)) { // some in more than one version
		base, _, _ := strings.Cut(path.Base(name), ":")
		if content, ok := contents[base]; ok {
			content.name = name
			images = append(images, content)
			delete(missing, base)
		}
	}
	if len(missing) > 0 {
		t.Fatalf("got images %s, want also %v", output, slices.Collect(maps.Keys(missing)))
	}
	return images
}

const busybox = "/bin/busybox"

// applets are the programs that busybox is.
func applets(t *testing.T) []string {
	t.Helper()
	output, err := exec.CommandContext(testenv.Context(t), busybox, "--list").Output()
	testenv.Must(t, err)
	return strings.Fields(string(output))
}

// withLibraries returns a program of this host and its libraries, by their paths in an image.
func withLibraries(t *testing.T, name string) map[string]string {
	t.Helper()
	program, err := exec.LookPath(name)
	testenv.Must(t, err)
	output, err := exec.CommandContext(testenv.Context(t), "ldd", program).CombinedOutput()
	if err != nil {
		t.Fatal(fmt.Errorf("ldd %s: %w: %s", program, err, output))
	}
	files := map[string]string{strings.TrimPrefix(program, "/"): program}
	for _, library := range regexp.MustCompile(`(/\S+) \(0x`).FindAllStringSubmatch(string(output), -1) {
		files[strings.TrimPrefix(library[1], "/")] = library[1]
	}
	return files
}
