package kube

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// conformance are Kubernetes' tests of what the network of each cluster must do.
const conformance = `\[sig-network\] (Networking|Services|HostPort).*\[Conformance\]`

// notHere are tests of what these clusters have not: DNS, the Internet, SCTP, time.
const notHere = `\[Disruptive\]|\[Slow\]|\[Feature:`

// TestE2E runs Kubernetes' own tests of networking.
func TestE2E(t *testing.T) {
	c := newCluster(t)
	c.startKubernetes(e2eImages(t)...)
	c.must("apply", "--kustomize", "manifests")
	for _, n := range c.nodes {
		c.awaitReady(n.Name, "")
	}
	report, err := os.Create(filepath.Join(c.logs(), "e2e.txt"))
	if err != nil {
		t.Fatal(err)
	}
	defer report.Close()
	cmd := c.ns.Command(context.Background(), binary(t, "e2e.test"), "--kubeconfig="+c.admin, "--provider=skeleton", "--num-nodes=3",
		"--ginkgo.no-color", "--ginkgo.timeout=50m", "--ginkgo.focus="+*e2eFocus, "--ginkgo.skip="+notHere)
	cmd.Stdout, cmd.Stderr = report, report
	err = cmd.Run()
	content, readErr := os.ReadFile(report.Name())
	if err != nil || readErr != nil {
		t.Errorf("%v, %v: see %s", err, readErr, report.Name())
	}
	summary := regexp.MustCompile(`(?m)^(Ran \d+ of .*|.*\d+ Passed.*|\s*\[FAIL\].*)$`)
	t.Logf("%s", strings.Join(summary.FindAllString(string(content), -1), "\n"))
	if !strings.Contains(string(content), "SUCCESS!") {
		t.Error("no success")
	}
}

// e2eImages are images with the names that Kubernetes' tests ask for. Where those have more, they say what is missing.
func e2eImages(t *testing.T) (images []image) {
	t.Helper()
	output, err := exec.Command(binary(t, "e2e.test"), "--list-images").Output()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{"agnhost": binary(t, "agnhost"), "bin/sh": "/bin/busybox", "bin/nc": "/bin/busybox"}
	for _, name := range []string{"curl", "ss"} {
		maps.Copy(files, withLibraries(t, name))
	}
	for name := range strings.FieldsSeq(string(output)) {
		switch {
		case strings.Contains(name, "/agnhost:"):
			images = append(images, image{name, []string{"/agnhost"}, files})
		case strings.Contains(name, "/pause:"):
			images = append(images, image{name, []string{"/pause"}, map[string]string{"pause": binary(t, "pause")}})
		}
	}
	if len(images) < 2 {
		t.Fatalf("no images of the tests among %s", output)
	}
	return images
}

// withLibraries returns a program of this host and its libraries, by their paths in an image.
func withLibraries(t *testing.T, name string) map[string]string {
	t.Helper()
	program, err := exec.LookPath(name)
	if err != nil {
		t.Fatal(err)
	}
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
