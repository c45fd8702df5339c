package testenv

import (
	"os"
	"path/filepath"
	"testing"
)

func TestFeatureMustBeIn(t *testing.T) {
	for _, tc := range []struct {
		since, kernel string
		want          bool
	}{
		{"6.6", "6.6.1-generic", true},
		{"6.6", "6.5.9", false},
		{"6.6", "6.12", true},
		{"6.6", "7.0", true},
		{"6.6", "5.10.0-30-cloud-amd64", false},
		{"0.0", "6.6", false},
	} {
		since, err := parseVersion(tc.since)
		Must(t, err)
		kernel, err := parseVersion(tc.kernel)
		Must(t, err)
		if got := (Feature{Since: since}).mustBeIn(kernel); got != tc.want {
			t.Errorf("since %s, kernel %s: %t", tc.since, tc.kernel, got)
		}
	}
	if _, err := parseVersion("linux"); err == nil {
		t.Error("no error for a release without numbers")
	}
}

func TestListsModule(t *testing.T) {
	dir := t.TempDir()
	for file, text := range map[string]string{
		"modules.dep":     "kernel/net/8021q/8021q.ko.xz: kernel/net/802/mrp.ko.xz kernel/net/802/garp.ko.xz\nkernel/drivers/net/tun.ko:\n",
		"modules.builtin": "kernel/net/sched/sch_fq.ko\n",
	} {
		Must(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644))
	}
	for name, want := range map[string]bool{
		"8021q": true, "tun": true, "sch_fq": true, "garp": false, "un": false, "sch": false, "sctp": false,
	} {
		if got := listsModule(dir, name); got != want {
			t.Errorf("%s: %t", name, got)
		}
	}
	if listsModule(t.TempDir(), "tun") {
		t.Error("found a module without lists")
	}
}
