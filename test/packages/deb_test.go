package packages

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const pluginsOfDebian = "/usr/lib/cni"

// TestInstall installs the package, and follows the README until a container is connected. Installing alone
// configures and enables nothing.
func TestInstall(t *testing.T) {
	h := newHost(t)
	before := h.files(t)
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	for file := range h.files(t) {
		if !before[file] && strings.HasPrefix(file, "/etc/") {
			t.Errorf("installing created %s, want nothing below /etc", file)
		}
	}
	for _, plugin := range []string{"ebpfnet", "ebpfnet-ipam"} {
		h.run(t, []string{"/opt/cni/bin/" + plugin}, plugin+" 0.", "CNI protocol versions supported")
	}
	h.run(t, []string{"ebpfnetctl", "version"}, "0.", "ABI")

	h.run(t, []string{"mkdir", "-p", "/etc/cni/net.d"})
	h.run(t, []string{"cp", "/usr/share/doc/ebpfnet/examples/10-ebpfnet.conflist", "/etc/cni/net.d"})
	pod := h.runtime(t, pluginsOfDebian).AddPod(t, "web", nil)
	h.run(t, []string{"ebpfnetctl", "attachments"}, "web", pod.Addr4().String())
	h.run(t, []string{"ebpfnetctl", "doctor"}, "good")
}

// TestRemove wants the package to stay while a container is connected. Afterwards removal warns of a configuration
// that names the plugin, and a purge leaves nothing but that.
func TestRemove(t *testing.T) {
	h := newHost(t)
	before := h.files(t)
	install := h.dpkg(t, "-i", deb(t, "present"))
	h.run(t, install)
	pod := h.runtime(t, pluginsOfDebian).AddPod(t, "web", nil)
	for _, verb := range []string{"--remove", "--purge"} {
		h.refuse(t, []string{"dpkg", verb, "ebpfnet"}, "stop the containers first", "pods web eth0")
		wantInstalled(t, h)
	}
	if _, err := testenv.Ask(testenv.Context(t), pod.Namespace, "udp", testenv.ServeUDP(t, h.Outside, outside).Addr, "hello"); err != nil {
		t.Errorf("after a refused removal: %v", err)
	}
	testenv.Must(t, pod.Del(testenv.Context(t)))

	const conflist = "/etc/cni/net.d/10-ebpfnet.conflist"
	h.run(t, []string{"mkdir", "-p", filepath.Dir(conflist)})
	h.run(t, []string{"cp", "/usr/share/doc/ebpfnet/examples/10-ebpfnet.conflist", conflist})
	h.run(t, []string{"dpkg", "--remove", "ebpfnet"}, conflist+" still names ebpfnet")
	h.run(t, []string{"rm", "-r", "/etc/cni"})
	h.run(t, []string{"dpkg", "--purge", "ebpfnet"})
	wantSame(t, before, h.files(t))

	h.run(t, install)
	h.run(t, []string{"dpkg", "--purge", "ebpfnet"})
	wantSame(t, before, h.files(t))
}

// TestRemoveLeavesOthers wants a purge to leave what others have: their plugins, networks and reservations.
func TestRemoveLeavesOthers(t *testing.T) {
	h := newHost(t)
	install := h.dpkg(t, "-i", deb(t, "present"))
	h.run(t, install)
	h.runtime(t, pluginsOfDebian).AddPod(t, "web", nil) // it loses its device below, so it is gone without DEL
	others := []string{"/opt/cni/bin/bridge", "/usr/lib/cni/bridge", "/var/lib/cni/networks/other/last_reserved_ip.0"}
	for _, file := range others {
		h.run(t, []string{"sh", "-c", "mkdir -p $(dirname " + file + ") && touch " + file})
	}
	h.run(t, []string{"ln", "-sfT", "/usr/lib/cni/bridge", "/opt/cni/bin/ebpfnet-ipam"}) // somebody's choice
	for _, link := range devices(t, h) {
		testenv.Must(t, h.Node.Netlink().LinkDel(link))
	}
	h.run(t, []string{"dpkg", "--purge", "ebpfnet"})
	files := h.files(t)
	for _, file := range append(others, "/opt/cni/bin/ebpfnet-ipam", "/var/lib/cni/networks/pods/10.84.0.2") {
		if !files[file] {
			t.Errorf("%s: purged, want it to stay", file)
		}
	}
	h.run(t, install) // for the runtime's DEL
}

// TestUnits wants valid units that installing does not enable, and a removal to disable them.
func TestUnits(t *testing.T) {
	h := newHost(t)
	before := h.files(t)
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	units := []string{"ebpfnet-load.service", "ebpfnet-metrics.timer"}
	for _, unit := range append(units, "ebpfnet-metrics.service") {
		if output := h.run(t, []string{"systemd-analyze", "verify", "--man=no", "/usr/lib/systemd/system/" + unit}); output != "" {
			t.Errorf("systemd-analyze verify %s: got %s, want nothing", unit, output)
		}
	}
	for _, unit := range units {
		h.refuse(t, []string{"systemctl", "is-enabled", unit}, "disabled")
		h.run(t, []string{"systemctl", "enable", unit})
	}
	h.run(t, []string{"dpkg", "--purge", "ebpfnet"})
	wantSame(t, before, h.files(t))
}

// TestUnitsCommands runs what the units run, with their capabilities.
func TestUnitsCommands(t *testing.T) {
	h := newHost(t)
	h.run(t, h.dpkg(t, "-i", deb(t, "present")))
	h.run(t, []string{"mkdir", "-p", collected})
	for _, unit := range []string{"ebpfnet-load", "ebpfnet-metrics"} {
		text := string(testenv.ReadFile(t, h.root+"/usr/lib/systemd/system/"+unit+".service"))
		capabilities := "-all"
		for name := range strings.FieldsSeq(setting(t, text, "CapabilityBoundingSet")) {
			capabilities += ",+" + strings.ToLower(strings.TrimPrefix(name, "CAP_"))
		}
		h.run(t, []string{"setpriv", "--bounding-set", capabilities, "--inh-caps", "-all", "--no-new-privs",
			"env", "TEXTFILE=" + collected + "/ebpfnet.prom", "sh", "-c", setting(t, text, "ExecStart")})
	}
	h.run(t, []string{"ebpfnetctl", "status"})
	if metrics := testenv.ReadFile(t, h.root+collected+"/ebpfnet.prom"); !strings.Contains(string(metrics), "ebpfnet_datapath_loaded 1") {
		t.Errorf("metrics: got %s, want a loaded datapath", metrics)
	}
	h.run(t, []string{"dpkg", "--remove", "ebpfnet"})
	h.refuse(t, []string{"ls", collected + "/ebpfnet.prom"})
	h.run(t, []string{"ls", collected})
}

// setting returns a setting of a unit.
func setting(t *testing.T, unit, key string) string {
	t.Helper()
	found := regexp.MustCompile(`(?m)^` + key + `=(.*)$`).FindStringSubmatch(unit)
	if found == nil {
		t.Fatalf("no %s in %s", key, unit)
	}
	return found[1]
}

// wantInstalled wants the package to be installed and configured.
func wantInstalled(t *testing.T, h *host) {
	t.Helper()
	h.run(t, []string{"dpkg-query", "-W", "-f", "${Status}", "ebpfnet"}, "ok installed")
	h.run(t, []string{"/opt/cni/bin/ebpfnet"}, "CNI protocol versions supported")
}

// wantSame wants no file to have come or gone, but for dpkg's log and rpm's database.
func wantSame(t *testing.T, before, after map[string]bool) {
	t.Helper()
	for _, files := range []map[string]bool{before, after} {
		maps.DeleteFunc(files, func(file string, _ bool) bool {
			return file == "/var/log/dpkg.log" || strings.HasPrefix(file, "/var/lib/rpm")
		})
	}
	for _, file := range slices.Sorted(maps.Keys(after)) {
		if !before[file] {
			t.Errorf("left: %s", file)
		}
	}
	for _, file := range slices.Sorted(maps.Keys(before)) {
		if !after[file] {
			t.Errorf("removed: %s", file)
		}
	}
}

// repack returns a copy of a package that edit has changed.
func repack(t *testing.T, deb string, edit func(dir string)) string {
	t.Helper()
	dir, out := t.TempDir()+"/tree", t.TempDir()+"/ebpfnet-repacked.deb"
	for _, args := range [][]string{{"-R", deb, dir}, {"-Znone", "--root-owner-group", "-b", dir, out}} {
		if output, err := exec.Command("dpkg-deb", args...).CombinedOutput(); err != nil {
			t.Fatalf("dpkg-deb %q: %v: %s", args, err, output)
		}
		if args[0] == "-R" {
			edit(dir)
		}
	}
	return out
}

// replace replaces text, which must occur, in a file.
func replace(t *testing.T, file, from, to string) {
	t.Helper()
	content := string(testenv.ReadFile(t, file))
	if !strings.Contains(content, from) {
		t.Fatalf("%s: %q not found in %s", file, from, content)
	}
	testenv.Must(t, os.WriteFile(file, []byte(strings.ReplaceAll(content, from, to)), 0o755))
}
