package kube

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// flannelDir has flannel's plugin and manifest.
const flannelDir = "flannel.d"

// TestFlannel follows the runbook on a cluster with flannel, whose pods talk.
func TestFlannel(t *testing.T) {
	c := newCluster(t)
	c.startKubernetes(flannelImages(t)...)
	for _, n := range c.nodes {
		n.run("mkdir", "-p", "/opt/cni/bin")
		n.run("cp", binary(t, "bridge"), binary(t, "host-local"), binary(t, "portmap"), "/opt/cni/bin")
	}
	manifest := c.flannelManifest()
	if _, err := c.apply([]byte(manifest), "apply", "--filename=-"); err != nil {
		t.Fatal(err)
	}
	c.rollout("kube-flannel", "kube-flannel-ds")
	c.must("apply", "--filename=manifests/web.yaml")
	c.rollout("default", "web")
	c.testPodToPod()
	old := c.web()

	page := testenv.ReadFile(t, "../../cmd/ebpfnet-node/manifests/FLANNEL.md")
	dir := t.TempDir()
	c.writeOverlay(dir, string(page))
	testenv.Must(t, os.WriteFile(filepath.Join(dir, "kube-flannel.yml"), []byte(manifest), 0o600))
	for _, block := range blocks(string(page), "sh") {
		switch first, _, _ := strings.Cut(block, ":"); first {
		case "# On each node, all at once":
			c.eventually("agents that wait", func() error {
				logs, err := c.kubectl("logs", "--namespace=kube-system", "--selector=app.kubernetes.io/name=ebpfnet-node")
				if count := strings.Count(logs, "refuses the route to every other node"); err == nil && count < len(c.nodes) {
					err = fmt.Errorf("got %d in %s, want %d", count, logs, len(c.nodes))
				}
				return err
			})
			c.testPodToPod()
		case "# For each NODE": // nothing has restarted a pod yet
			wantPods(t, c.web(), old)
		}
		c.follow(dir, block)
	}
	c.rollout("default", "web")
	for i, p := range c.web() {
		if p.name == old[i].name || !strings.Contains(p.node.run("ebpfnetctl", "attachments"), p.addrs[0].String()) {
			t.Errorf("pod %s of %s: got flannel's, want a new one", p.name, p.node.Name)
		}
	}
	c.testPodToPod()
	c.testService()
	c.testNodePort()
	c.testHostPort()
	for _, n := range c.nodes {
		left := n.run("sh", "-c", "ip -oneline link | grep -e flannel -e cni0; iptables-save 2>/dev/null | grep -e FLANNEL -e CNI-; ls /etc/cni/net.d; ls /var/lib/cni/networks")
		if want := "10-ebpfnet.conflist\ncbr0\n"; left != want {
			t.Errorf("%s: got %s, want %s", n.Name, left, want)
		}
	}
}

// blocks returns the blocks of code of a page in a language.
func blocks(page, language string) (list []string) {
	for _, match := range regexp.MustCompile("(?s)```"+language+"\n(.*?)```").FindAllStringSubmatch(page, -1) {
		list = append(list, match[1])
	}
	return list
}

// follow runs a block where its first line says: on each node, for each node, or once, in a directory.
func (c *cluster) follow(dir, block string) {
	c.t.Helper()
	first, _, _ := strings.Cut(block, "\n")
	c.t.Logf("%s", block)
	for i, n := range c.nodes {
		switch {
		case strings.HasPrefix(first, "# On each node"):
			n.run("sh", "-exc", block)
		case strings.HasPrefix(first, "# For each NODE") || i == 0:
			cmd := c.ns.Command(context.Background(), "sh", "-exc", "cd "+dir+"\n"+strings.ReplaceAll(block, "NODE", n.Name))
			cmd.Env = append(os.Environ(), "HOME="+c.dir, "KUBECONFIG="+c.admin, "PATH="+os.Getenv(testenv.BinDirEnv)+":"+os.Getenv("PATH"))
			if output, err := cmd.CombinedOutput(); err != nil {
				c.t.Fatalf("%v: %s", err, output)
			}
		}
	}
}

// writeOverlay writes the page's overlay, with this cluster's agent.
func (c *cluster) writeOverlay(dir, page string) {
	c.t.Helper()
	overlay := filepath.Join(dir, "ebpfnet")
	files := map[string]string{
		"kustomization.yaml": strings.Replace(blocks(page, "yaml")[0], "../src/cmd/ebpfnet-node/manifests", "agent.yaml", 1),
		"agent.yaml":         c.agentManifests(),
	}
	testenv.Must(c.t, os.Mkdir(overlay, 0o700))
	for name, content := range files {
		testenv.Must(c.t, os.WriteFile(filepath.Join(overlay, name), []byte(content), 0o600))
	}
}

// flannelManifest returns flannel's own manifest with this cluster's pod network.
func (c *cluster) flannelManifest() string {
	c.t.Helper()
	manifest := testenv.ReadFile(c.t, binary(c.t, flannelDir+"/kube-flannel.yml"))
	network := ""
	for _, f := range families {
		if strings.Contains(f.pods, ":") {
			network += fmt.Sprintf(`"EnableIPv6": true, "IPv6Network": %q,`, f.pods)
		} else {
			network += fmt.Sprintf(`"EnableIPv4": true, "Network": %q,`, f.pods)
		}
	}
	return strings.Replace(string(manifest), `"Network": "10.244.0.0/16",`, network, 1)
}

// flannelImages are those of its manifest: flanneld with iptables, and the plugin.
func flannelImages(t *testing.T) (images []image) {
	t.Helper()
	manifest := testenv.ReadFile(t, binary(t, flannelDir+"/kube-flannel.yml"))
	files := map[string]string{"opt/bin/flanneld": binary(t, "flannel"), "flannel": binary(t, flannelDir+"/flannel"), "bin/cp": busybox}
	maps.Copy(files, withLibraries(t, binary(t, "flannel")))
	for _, name := range []string{"iptables", "iptables-restore", "ip6tables", "ip6tables-restore"} {
		maps.Copy(files, withLibraries(t, name))
		files["bin/"+name] = files["usr/sbin/"+name]
	}
	extensions, err := filepath.Glob("/usr/lib/*/xtables/*.so")
	testenv.Must(t, err)
	for _, file := range extensions {
		files[strings.TrimPrefix(file, "/")] = file
	}
	for _, match := range regexp.MustCompile(`image: (\S+)`).FindAllStringSubmatch(string(manifest), -1) {
		if !slices.ContainsFunc(images, func(i image) bool { return i.name == match[1] }) {
			images = append(images, image{match[1], []string{"/flannel"}, files, nil})
		}
	}
	return images
}
