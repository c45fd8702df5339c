package metrics

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// TestPools reads the list in containerd's directory, beside files that say nothing.
func TestPools(t *testing.T) {
	const list = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "ebpfnet",
		"ipam": {"type": "host-local", "dataDir": "/nowhere", "ranges": [[{"subnet": "10.84.0.0/24"}]]}}]}`

	root := t.TempDir()
	for name, text := range map[string]string{
		"etc/containerd/config.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nconf_dir = '/k3s'\n",
		"k3s/10-broken.conflist":     "{",
		"k3s/20-pods.conflist":       list,
		"k3s/30-again.conflist":      list,
	} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("gone", filepath.Join(root, "k3s/05-gone.conflist")); err != nil {
		t.Fatal(err)
	}
	pools, err := poolsOf(runtimes.Options{Root: root})
	if err != nil || len(pools) != 1 || pools[0].network != "pods" || len(pools[0].ranges) != 1 || pools[0].ranges[0].Addresses != 253 {
		t.Errorf("got %+v (%v), want one pool of 253 addresses", pools, err)
	}
}
