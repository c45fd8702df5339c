package runtimes

import (
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// rootWith returns a directory with these files.
func rootWith(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestFind(t *testing.T) {
	containerd := func(source, conf string, bins ...string) Runtime {
		return Runtime{Name: "containerd", Source: source, ConfDir: conf, BinDirs: bins, CallsLoopback: true}
	}
	const main = "/etc/containerd/config.toml"
	for name, test := range map[string]struct {
		files map[string]string
		want  []Runtime
	}{
		"none": {nil, []Runtime{{ConfDir: defaultConfDir, BinDirs: defaultBinDirs}}},
		"containerd without a file": {map[string]string{"usr/bin/containerd": ""},
			[]Runtime{containerd("", defaultConfDir, "/opt/cni/bin")}},
		"version 1": {map[string]string{main: "[plugins.cri.cni]\nbin_dir = \"/usr/lib/cni\"\n"},
			[]Runtime{containerd(main, defaultConfDir, "/usr/lib/cni")}},
		"version 2": {map[string]string{main: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/b\"\nconf_dir = \"/c\"\nmax_conf_num = 1\n"},
			[]Runtime{containerd(main, "/c", "/b")}},
		"version 3": {map[string]string{main: "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nbin_dir = ''\nbin_dirs = ['/b', '/d']\nconf_dir = '/c'\n"},
			[]Runtime{containerd(main, "/c", "/b", "/d")}},
		"imports": {map[string]string{
			main:                            "version = 2\nimports = [\"conf.d/*.toml\", \"/etc/containerd/config.toml\"]\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/b\"\n",
			"etc/containerd/conf.d/10.toml": "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nconf_dir = \"/c\"\n"},
			[]Runtime{containerd(main, "/c", "/b")}},
		"sets lo up itself": {map[string]string{main: "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nuse_internal_loopback = true\n"},
			[]Runtime{{Name: "containerd", Source: main, ConfDir: defaultConfDir, BinDirs: []string{"/opt/cni/bin"}}}},
		"sets lo up itself, by another file": {map[string]string{
			"proc/7/cmdline": "/usr/bin/containerd\x00--config=/run/c.toml\x00", "run/containerd/containerd.sock": "",
			"run/c.toml": "version = 3\n[plugins.'io.containerd.cri.v1.runtime'.cni]\nuse_internal_loopback = true\n"},
			[]Runtime{{Name: "containerd", Source: "/run/c.toml", ConfDir: defaultConfDir, BinDirs: []string{"/opt/cni/bin"}}}},
		"k3s that runs": {map[string]string{
			"proc/7/cmdline": "containerd\x00-c\x00" + containerdFiles[1] + "\x00", "proc/8/cmdline": "less\x00-c\x00/c.toml\x00", containerdFiles[1]: "", "c.toml": ""},
			[]Runtime{containerd(containerdFiles[1], defaultConfDir, "/opt/cni/bin")}},
		"of docker that runs": {map[string]string{
			"proc/7/cmdline": "containerd\x00--config\x00/run/c.toml\x00", "run/c.toml": "disabled_plugins = ['cri']\n", "usr/bin/containerd": ""},
			[]Runtime{{ConfDir: defaultConfDir, BinDirs: defaultBinDirs}}},
		"of docker": {map[string]string{main: "disabled_plugins = [\"cri\"]\n"},
			[]Runtime{{ConfDir: defaultConfDir, BinDirs: defaultBinDirs}}},
		"k3s": {map[string]string{containerdFiles[1]: "version = 2\n[plugins.\"io.containerd.grpc.v1.cri\".cni]\nbin_dir = \"/var/lib/rancher/k3s/data/cni\"\nconf_dir = \"/var/lib/rancher/k3s/agent/etc/cni/net.d\"\n"},
			[]Runtime{containerd(containerdFiles[1], "/var/lib/rancher/k3s/agent/etc/cni/net.d", "/var/lib/rancher/k3s/data/cni")}},
		"CRI-O": {map[string]string{"usr/bin/crio": ""},
			[]Runtime{{Name: "CRI-O", ConfDir: defaultConfDir, BinDirs: []string{"/opt/cni/bin"}, SkipsInvalid: true}}},
		"CRI-O, parts": {map[string]string{
			"etc/crio/crio.conf":             "[crio.network]\nnetwork_dir = \"/c\"\nplugin_dirs = [\"/b\", \"/d\"]\n",
			"etc/crio/crio.conf.d/10-a.conf": "[crio.network]\nplugin_dirs = [\"/e\"]\n[crio.runtime]\nlog_level = \"info\"\n",
			"etc/crio/crio.conf.d/20-b.conf": "[crio.network]\ncni_default_network = \"pods\"\n"},
			[]Runtime{{Name: "CRI-O", Source: "/etc/crio/crio.conf.d/20-b.conf", ConfDir: "/c", BinDirs: []string{"/e"}, Network: "pods", SkipsInvalid: true}}},
	} {
		if got, err := find(rootWith(t, test.files)); err != nil || !reflect.DeepEqual(got, test.want) {
			t.Errorf("%s: got %+v (%v), want %+v", name, got, err, test.want)
		}
	}
}

// TestOptions names directories, below a root that only others are below.
func TestOptions(t *testing.T) {
	for _, test := range []struct {
		options Options
		want    Runtime
	}{
		{Options{Root: "/none"}, Runtime{ConfDir: "/none" + defaultConfDir, BinDirs: []string{"/none/opt/cni/bin", "/none/usr/lib/cni", "/none/usr/libexec/cni"}}},
		{Options{Root: "/none", BinDirs: []string{"/b"}}, Runtime{ConfDir: "/none" + defaultConfDir, BinDirs: []string{"/b"}}},
		{Options{ConfDir: "/c"}, Runtime{Source: "--conf-dir", ConfDir: "/c", BinDirs: defaultBinDirs}},
		{Options{ConfDir: "/c", BinDirs: []string{"/b"}}, Runtime{Source: "--conf-dir", ConfDir: "/c", BinDirs: []string{"/b"}}},
	} {
		if got, err := test.options.Find(); err != nil || !reflect.DeepEqual(got, []Runtime{test.want}) {
			t.Errorf("%+v: got %+v (%v), want %+v", test.options, got, err, test.want)
		}
	}
}

func TestFindErrors(t *testing.T) {
	for _, file := range []string{containerdFiles[0], "/etc/crio/crio.conf"} {
		got, err := find(rootWith(t, map[string]string{file: "version = \n"}))
		if len(got) > 0 || err == nil || !strings.Contains(err.Error(), file) {
			t.Errorf("%s: got %+v, error %v; want none, and the file's name", file, got, err)
		}
	}
}

func TestTakes(t *testing.T) {
	const list = `{"cniVersion": "1.0.0", "name": "NAME", "plugins": [{"type": "ebpfnet"}]}`

	root := rootWith(t, map[string]string{
		"c/05-note.txt":        "not a configuration",
		"c/10-broken.conflist": `{"name": "broken"`,
		"c/20-one.conf":        `{"cniVersion": "1.0.0", "name": "one", "type": "bridge"}`,
		"c/30-pods.conflist":   strings.Replace(list, "NAME", "pods", 1),
		"c/15-list.json":       strings.Replace(list, "NAME", "list", 1), // containerd and CRI-O take it for a single plugin
	})
	for _, test := range []struct {
		runtime Runtime
		want    string
	}{
		{Runtime{}, "10-broken.conflist"},
		{Runtime{SkipsInvalid: true}, "20-one.conf"},
		{Runtime{SkipsInvalid: true, Network: "pods"}, "30-pods.conflist"},
		{Runtime{SkipsInvalid: true, Network: "other"}, ""},
	} {
		test.runtime.ConfDir = "/c"
		files, err := test.runtime.in(root).Files()
		got := ""
		if taken := test.runtime.Takes(files); taken != nil {
			got = filepath.Base(taken.Path)
		}
		if err != nil || len(files) != 4 || got != test.want {
			t.Errorf("%+v: got %q of %d files (%v), want %q of 4", test.runtime, got, len(files), err, test.want)
		}
	}
}

func TestBinary(t *testing.T) {
	root := rootWith(t, map[string]string{"a/ebpfnet": "", "b/ebpfnet": "", "b/other/x": ""})
	if err := os.Chmod(filepath.Join(root, "b/ebpfnet"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := Runtime{BinDirs: []string{"/none", "/a", "/b"}}.in(root)
	if got, want := r.Binary("ebpfnet"), filepath.Join(root, "b/ebpfnet"); got != want {
		t.Errorf("got %q, want %q: the other cannot be executed", got, want)
	}
	if got := r.Binary("other"); got != "" {
		t.Errorf("a directory: got %q, want none", got)
	}
}
