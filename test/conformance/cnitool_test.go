package conformance

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// cnitool is the CNI project's tool with the example configuration installed.
type cnitool struct {
	host   *host
	binary string
	env    []string
}

func newCNITool(t *testing.T, h *host) *cnitool {
	t.Helper()
	confDir := t.TempDir()
	if err := os.WriteFile(filepath.Join(confDir, "10-pods.conflist"), exampleConflist(t), 0o644); err != nil {
		t.Fatal(err)
	}
	return &cnitool{
		host:   h,
		binary: testenv.Build(t, "github.com/containernetworking/cni/cnitool"),
		env:    append(os.Environ(), "NETCONFPATH="+confDir, "CNI_PATH="+filepath.Dir(h.plugin)),
	}
}

// run returns cnitool's output, and fails the test if cnitool fails.
func (c *cnitool) run(t *testing.T, verb string, ns *testenv.Namespace, env ...string) []byte {
	t.Helper()
	cmd := c.host.Node.Command(testenv.Context(t), c.binary, verb, "pods", ns.Path)
	cmd.Env = append(c.env, env...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		t.Fatalf("cnitool %s: %v: %s%s", verb, err, &stdout, &stderr)
	}
	return stdout.Bytes()
}

func TestCNITool(t *testing.T) {
	h := newHost(t)
	tool := newCNITool(t, h)
	server, client := testenv.New(t, "server"), testenv.New(t, "client")
	before := h.snapshot(t, server, client)

	const mapping = `CAP_ARGS={"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}`
	result := parseResult(t, tool.run(t, "add", server, mapping))
	t.Cleanup(func() { tool.run(t, "del", server) })
	tool.run(t, "add", client)
	t.Cleanup(func() { tool.run(t, "del", client) })

	wantPing(t, client, addresses(result)...)
	wantFetch(t, h, server, result)

	tool.run(t, "check", server, mapping)
	tool.run(t, "check", client)
	tool.run(t, "del", server, mapping)
	tool.run(t, "del", client)
	h.wantUnchanged(t, before, server, client)
}

// wantFetch fetches a page from host port 8080, in both families, from the outside. The server must see the
// client's own address.
func wantFetch(t *testing.T, h *host, server *testenv.Namespace, result *types100.Result) {
	t.Helper()
	for _, addr := range addresses(result) {
		testenv.ServeHTTP(t, server, netip.AddrPortFrom(addr, 80))
	}
	for _, f := range testenv.Families {
		url := "http://" + netip.AddrPortFrom(f.Node, 8080).String() + "/"
		seen, err := testenv.HTTPGet(testenv.Context(t), h.Outside, url)
		if err != nil {
			t.Errorf("get %s: %v", url, err)
		} else if !strings.Contains(seen, f.Outside.String()) {
			t.Errorf("server sees %s, want %s", seen, f.Outside)
		}
	}
}
