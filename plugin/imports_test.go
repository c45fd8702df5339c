package plugin

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// packages lists this module and that of the node agent in the order of doc.go, from bottom to top, each with the packages
// that it may import. A package may import only packages above its own line.
var packages = []struct{ dir, imports string }{
	{"plugin/show", ""},
	{"plugin/version", ""},
	{"plugin/runtimes", ""},
	{"bpf", ""},
	{"loader/flock", ""},
	{"loader/rtnl", ""},
	{"loader", "bpf loader/flock loader/rtnl"},
	{"maps", "bpf loader"},
	{"ipam", "loader/flock plugin/show"},
	{"plugin/link", "loader loader/rtnl"},
	{"plugin/nodestate", "maps plugin/show"},
	{"plugin/cnierr", "ipam loader loader/flock maps plugin/link plugin/nodestate plugin/show"},
	{"plugin/names", "loader maps"},
	{"plugin/namespace", "loader/rtnl plugin/cnierr plugin/link"},
	{"plugin/record", "loader maps plugin/link plugin/names"},
	{"plugin/policy", "maps plugin/cnierr"},
	{"plugin/config", "ipam loader maps plugin/cnierr plugin/link plugin/policy plugin/record plugin/show"},
	{"plugin/cni", "plugin/cnierr plugin/config plugin/show plugin/version"},
	{"plugin/refresh", "loader loader/rtnl maps plugin/link plugin/names"},
	{"plugin/admin", "bpf loader loader/rtnl maps plugin/config plugin/link plugin/names plugin/namespace plugin/nodestate plugin/policy plugin/refresh plugin/record"},
	{"plugin/containers", "plugin/admin"},
	{"plugin/drops", "bpf plugin/containers loader loader/flock loader/rtnl maps plugin/link plugin/nodestate plugin/policy plugin/admin"},
	{"plugin/metrics", "bpf ipam loader maps plugin/config plugin/admin plugin/runtimes plugin/show plugin/version"},
	{"plugin", "ipam loader loader/flock loader/rtnl maps plugin/cni plugin/cnierr plugin/config plugin/link plugin/names plugin/namespace plugin/nodestate plugin/refresh plugin/record plugin/show"},
	{"cmd/ebpfnet", "plugin plugin/cni"},
	{"cmd/ebpfnet-ipam", "ipam plugin/cni plugin/cnierr plugin/config plugin/link plugin/record"},
	{"cmd/ebpfnetctl/firewall", ""},
	{"cmd/ebpfnetctl/bugreport", "plugin/runtimes plugin/show"},
	{"cmd/ebpfnetctl/output", "plugin/show"},
	{"cmd/ebpfnetctl/doctor", "bpf plugin/containers cmd/ebpfnetctl/firewall cmd/ebpfnetctl/output plugin/runtimes ipam loader loader/rtnl maps plugin plugin/cni plugin/config plugin/link plugin/names plugin/nodestate plugin/admin plugin/refresh"},
	{"cmd/ebpfnetctl/migrate", "plugin/containers plugin/runtimes loader loader/flock loader/rtnl maps plugin plugin/cni plugin/cnierr plugin/config plugin/link plugin/names plugin/nodestate plugin/admin plugin/record"},
	{"cmd/ebpfnetctl/trace", "bpf cmd/ebpfnetctl/firewall loader loader/rtnl maps plugin/link plugin/nodestate plugin/policy plugin/admin"},
	{"cmd/ebpfnet-node/watch", ""},
	{"cmd/ebpfnet-node/desired", "loader/rtnl maps plugin/nodestate"},
	{"cmd/ebpfnet-node/conflist", "plugin/config plugin/show"},
	{"cmd/ebpfnet-node/apitest", ""},
	{"cmd/ebpfnet-node/nodes", "cmd/ebpfnet-node/desired cmd/ebpfnet-node/watch"},
	{"cmd/ebpfnet-node/policies", "bpf loader loader/rtnl maps plugin/nodestate plugin/policy"},
	{"cmd/ebpfnet-node/objects", "cmd/ebpfnet-node/policies cmd/ebpfnet-node/watch"},
	{"cmd/ebpfnet-node/reconcile", "cmd/ebpfnet-node/desired loader/rtnl maps plugin/link plugin/names plugin/nodestate"},
	{"cmd/ebpfnet-node/binaries", "plugin/nodestate"},
	{"cmd/ebpfnet-node/probe", "cmd/ebpfnet-node/desired"},
	{"cmd/ebpfnet-node/health", "plugin/show"},
	{"cmd/ebpfnet-node", "bpf cmd/ebpfnet-node/binaries cmd/ebpfnet-node/conflist cmd/ebpfnet-node/desired cmd/ebpfnet-node/health cmd/ebpfnet-node/nodes cmd/ebpfnet-node/objects cmd/ebpfnet-node/policies cmd/ebpfnet-node/probe cmd/ebpfnet-node/reconcile plugin/drops loader loader/rtnl maps plugin/admin plugin/metrics plugin/nodestate plugin/record plugin/refresh plugin/runtimes plugin/show"},
	{"cmd/ebpfnetctl", "bpf cmd/ebpfnetctl/bugreport plugin/containers cmd/ebpfnetctl/doctor plugin/drops plugin/metrics cmd/ebpfnetctl/migrate cmd/ebpfnetctl/output plugin/runtimes cmd/ebpfnetctl/trace loader loader/rtnl maps plugin/config plugin/link plugin/nodestate plugin/policy plugin/admin plugin/record plugin/show plugin/version"},
}

// TestImports requires that imports go one way, down the list of packages.
func TestImports(t *testing.T) {
	var above []string
	allowed := map[string][]string{}
	for _, p := range packages {
		allowed[p.dir] = strings.Fields(p.imports)
		for _, imported := range allowed[p.dir] {
			if !slices.Contains(above, imported) {
				t.Errorf("%s may import %s, which is not above it", p.dir, imported)
			}
		}
		above = append(above, p.dir)
	}
	for dir, imports := range importsOf(t) {
		if !slices.Contains(above, dir) {
			t.Errorf("%s is not listed", dir)
		}
		for _, imported := range imports {
			if !slices.Contains(allowed[dir], imported) {
				t.Errorf("%s imports %s, which it may not", dir, imported)
			}
		}
	}
}

// TestLeanPlugins requires that a plugin, which starts for each call, contains nothing that parses command lines.
func TestLeanPlugins(t *testing.T) {
	for _, command := range []string{"ebpfnet", "ebpfnet-ipam"} {
		out, err := exec.Command("go", "list", "-deps", "github.com/ebpfnet/ebpfnet/cmd/"+command).Output()
		if err != nil {
			t.Fatalf("list what %s imports: %v", command, err)
		}
		packages := strings.Fields(string(out))
		if !slices.Contains(packages, "github.com/ebpfnet/ebpfnet/plugin/cni") {
			t.Errorf("%s: got packages %q, want plugin/cni among them", command, packages)
		}
		for _, name := range packages {
			for _, heavy := range []string{"github.com/spf13/", "go.yaml.in/", "k8s.io/", "github.com/BurntSushi/", "github.com/prometheus/client_golang/"} {
				if strings.HasPrefix(name, heavy) {
					t.Errorf("%s imports %s, which belongs in ebpfnetctl alone", command, name)
				}
			}
		}
	}
}

// importsOf returns the packages of this module that each of its directories imports, without tests.
func importsOf(t *testing.T) map[string][]string {
	t.Helper()
	const root, module = "..", "github.com/ebpfnet/ebpfnet/"

	imports := map[string][]string{}
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		switch file {
		case filepath.Join(root, "test"), filepath.Join(root, "cmd/release"): // modules of their own, and not for hosts
			return fs.SkipDir
		}
		if entry.IsDir() || path.Ext(file) != ".go" || strings.HasSuffix(file, "_test.go") {
			return nil
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(file))
		if err != nil {
			return err
		}
		var inside []string
		for _, spec := range parsed.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if name, ok := strings.CutPrefix(imported, module); ok {
				inside = append(inside, name)
			}
		}
		imports[dir] = append(imports[dir], inside...)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return imports
}
