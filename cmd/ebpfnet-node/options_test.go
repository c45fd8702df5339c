package main

import (
	"bytes"
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnet-node/desired"
)

// TestOptions names the flag, its value and what is expected.
func TestOptions(t *testing.T) {
	t.Setenv("NODE_NAME", "a")
	for args, want := range map[string]string{
		"":                                    "",
		"--node b --mode auto --vni 7":        "",
		"--mtu 9000 --port 8472":              "",
		"--cluster-cidr 10.244.0.0/16":        "",
		"--cluster-cidr 10.0.0.0/8,fd44::/48": "",
		"x":                                   `got arguments ["x"], want none or uninstall`,
		"uninstall --stay":                    "",
		"uninstall x":                         `got arguments ["uninstall","x"], want none or uninstall`,
		"--node=":                             "--node: got none",
		"--mode=bgp":                          `--mode: got "bgp", want tunnel, direct or auto`,
		"--device=0123456789abcdef":           `--device: got "0123456789abcdef", want 1 to 15 characters`,
		"--port=0":                            "--port: got 0, want 1 to 65535",
		"--probe-port=0":                      "--probe-port: got 0, want 1 to 65535",
		"--port=65536":                        "--port: got 65536, want 1 to 65535",
		"--vni=16777216":                      "--vni: got 16777216, want 0 to 16777215",
		"--mtu=100":                           "--mtu: got 100, want 0, or 576 to 65535",
		"--cluster-cidr=10.244.1.0/16":        `--cluster-cidr: got "10.244.1.0/16", want a prefix`,
		"--conflist=/etc/cni/net.d/10.x":      "want a file that ends in .conflist",
		"--state=node.json":                   `--state: got "node.json", want an absolute path`,
		"--listen=9909":                       `--listen: got "9909", want ADDRESS:PORT`,
	} {
		_, err := parseOptions(strings.Fields(args))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: got error %v, want %q", args, err, want)
		}
	}
}

// TestLacksLimit is so where neither the cluster's prefixes nor the API server's own address are known.
func TestLacksLimit(t *testing.T) {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	const content = `{"clusters": [{"name": "c", "cluster": {"server": "https://192.0.2.10:6443"}}], "contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}`
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	for args, want := range map[string]bool{
		"": false, "--api-server=https://[2001:db8::1]:6443": false, "--api-server=https://api.example:6443": true,
		"--api-server=https://api.example:6443 --cluster-cidr=10.244.0.0/16": false,
	} {
		o, err := parseOptions(strings.Fields("--node=a --kubeconfig=" + file + " " + args))
		if err == nil {
			_, err = o.api()
		}
		if err != nil {
			t.Fatal(err)
		}
		if got := o.lacksLimit(); got != want {
			t.Errorf("%q: got %v, want %v", args, got, want)
		}
	}
	inCluster := options{Config: desired.Config{Reserved: []netip.Addr{netip.MustParseAddr("10.96.0.1")}}}
	if !inCluster.lacksLimit() {
		t.Error("in a cluster: got false, want true: the service's address is not the API server's")
	}
}

// TestHelp is not an error.
func TestHelp(t *testing.T) {
	if err := run(context.Background(), []string{"--help"}, &bytes.Buffer{}, &bytes.Buffer{}); !errors.Is(err, pflag.ErrHelp) {
		t.Errorf("got %v, want %v", err, pflag.ErrHelp)
	}
}
