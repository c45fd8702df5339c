package containers

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// cached is a file of libcni's cache.
const cached = `{"kind": "cniCacheV1", "containerId": "ID", "config": "e30=", "ifName": "eth0", "networkName": "pods", "cniArgs": ARGS, "result": {}}`

const fakeCtr = `#!/bin/sh
[ "$*" = "--namespace default containers info 4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f4f" ] || exit 1
echo '{"ID": "4f4f", "Labels": {"nerdctl/name": "web", "nerdctl/namespace": "default"}}'
`

func TestNames(t *testing.T) {
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "ctr"), []byte(fakeCtr), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	of4f, of5e := strings.Repeat("4f", 32), strings.Repeat("5e", 32)
	for name, test := range map[string]struct{ dir, id, args, want string }{
		"podman":                    {"results", of4f, `[["IgnoreUnknown","1"],["K8S_POD_NAME","web"]]`, "web"},
		"podman, old libcni":        {"cache/results", of4f, `[["IgnoreUnknown","1"],["K8S_POD_NAME","web"]]`, "web"},
		"Kubernetes":                {"results", of4f, `[["IgnoreUnknown","1"],["K8S_POD_NAMESPACE","shop"],["K8S_POD_NAME","web-0"],["K8S_POD_INFRA_CONTAINER_ID","4f4f"]]`, "shop/web-0"},
		"nerdctl":                   {"results", "default-" + of4f, `[["IgnoreUnknown","1"]]`, "web"},
		"nerdctl, gone":             {"results", "default-" + of5e, `[["IgnoreUnknown","1"]]`, ""},
		"another namespace":         {"results", "other-" + of4f, `[]`, ""},
		"no name":                   {"results", of4f, `[]`, ""},
		"no arguments":              {"results", of4f, `null`, ""},
		"a namespace without a pod": {"results", of4f, `[["K8S_POD_NAMESPACE","shop"]]`, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cache := t.TempDir()
			file := filepath.Join(cache, test.dir, "pods-"+test.id+"-eth0")
			if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
				t.Fatal(err)
			}
			text := strings.NewReplacer("ID", test.id, "ARGS", test.args).Replace(cached)
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if got := Names(t.Context(), cache)[test.id]; got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}
