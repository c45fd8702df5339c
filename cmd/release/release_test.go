package main

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

func TestVersions(t *testing.T) {
	for version, want := range map[string]bool{
		"1.2.3": true, "0.1.0": true, "10.20.30-rc.1": true, "1.2.3-test": true,
		"": false, "v1.2.3": false, "1.2": false, "01.2.3": false, "1.2.3-": false, "1.2.3+meta": false, "1.2.3 -X main.x=y": false, "../1.2.3": false,
	} {
		if got := versions.MatchString(version); got != want {
			t.Errorf("version %q: got valid %t, want %t", version, got, want)
		}
	}
}

// source writes a source tree that has release notes only.
func source(t *testing.T, notes string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(dir+"/cmd/release", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir+"/cmd/release/CHANGELOG.md", []byte(notes), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestNotes(t *testing.T) {
	const notes = "# Notes\n\n## Unreleased\n\nNew.\n\n## 1.2.3 (2026-01-01)\n\nOld.\n\n## 1.2.30\n\nOlder.\n"
	for _, test := range []struct{ notes, version, want string }{
		{notes, "1.2.3", "Old."},
		{notes, "1.2.30", "Older."},
		{notes, "2.0.0-rc.1", "New."},
		{"# Notes\n\n## 2.0.0\n\nComplete.\n", "2.0.0-rc.1", "Complete."},
		{notes, "1.2.4", ""},
		{notes, "1.2", ""},
	} {
		r := &release{options: options{version: test.version, source: source(t, test.notes)}}
		got, err := r.notes()
		if string(got) != test.want || (err == nil) != (test.want != "") {
			t.Errorf("notes on %s: got %q (%v), want %q", test.version, got, err, test.want)
		}
	}
}

// TestNotesNameTheLayout requires notes that say which map layout the programs have.
func TestNotesNameTheLayout(t *testing.T) {
	for text, want := range map[string]bool{
		"Map layout: 9.": true, "Map layout: 9 (was 8).": true, "Map layout: 8.": false, "Map layout: 90.": false, "": false,
	} {
		if err := layoutIn([]byte(text), 9); (err == nil) != want {
			t.Errorf("notes %q with layout 9: got %v, want valid %t", text, err, want)
		}
	}
}

func TestWriteTar(t *testing.T) {
	dir := t.TempDir()
	var files []file
	for _, name := range []string{"b", "a"} {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
		files = append(files, file{path, "top/" + name, 0o755})
	}
	modified := time.Unix(1_700_000_000, 0)
	var out bytes.Buffer
	if err := writeTar(&out, files, modified); err != nil {
		t.Fatal(err)
	}
	reader := tar.NewReader(&out)
	for _, want := range []string{"top/a", "top/b"} {
		header, err := reader.Next()
		if err != nil {
			t.Fatal(err)
		}
		if header.Name != want || header.Mode != 0o755 || !header.ModTime.Equal(modified) || header.Uid != 0 {
			t.Errorf("got %+v, want %s of root with mode 755 and the time of the commit", header, want)
		}
	}
	if _, err := reader.Next(); err != io.EOF {
		t.Errorf("after the last file: got %v, want the end", err)
	}
}

func TestComponent(t *testing.T) {
	c := component("library", "example.com/m", "v1.0.0", "h1:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=")
	if c.PackageURL != "pkg:golang/example.com/m@v1.0.0" || c.Hashes == nil ||
		(*c.Hashes)[0].Value != "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f" {
		t.Errorf("component: got %+v, want its package URL and the digest of its sum", c)
	}
}

// TestLinks wants links of what is shipped to stay, and others to lead to the sources.
func TestLinks(t *testing.T) {
	const text = "[a](../README.md), [b](#keys), [c](../bpf/README.md#figures), [d](https://example.com/x), `f(x)`"
	const want = "[a](../README.md), [b](#keys), [c](https://sources/bpf/README.md#figures), [d](https://example.com/x), `f(x)`"
	if got := string(withLinks([]byte(text), "plugin", "https://sources")); got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// TestImage wants an OCI archive that is valid, has an image for each architecture, and is the same if built again.
func TestImage(t *testing.T) {
	r := &release{options: options{version: "1.2.3", out: t.TempDir()}, stage: t.TempDir(), time: time.Unix(1_700_000_000, 0)}
	names := []string{"copyright-image"}
	for _, arch := range arches {
		names = append(names, "sbom-image-"+arch+".cdx.json")
		for _, command := range inImage.commands {
			names = append(names, arch+"/"+command.name)
		}
	}
	for _, name := range names {
		if err := r.writeStaged(name, []byte(name)); err != nil {
			t.Fatal(err)
		}
	}
	var built [2][]byte
	for i := range built {
		if err := r.writeImage(); err != nil {
			t.Fatal(err)
		}
		var err error
		if built[i], err = os.ReadFile(r.out + "/ebpfnet-1.2.3-image.tar"); err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			break
		}
		index, err := layout.ImageIndexFromPath(r.staged("image"))
		if err == nil {
			err = validate.Index(index)
		}
		if err != nil {
			t.Errorf("image: %v", err)
		}
		if err := os.RemoveAll(r.staged("image")); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(built[0], built[1]) {
		t.Error("two archives of one image differ")
	}
	for _, arch := range arches {
		if !bytes.Contains(built[0], []byte(`"architecture":"`+arch+`"`)) {
			t.Errorf("archive: no image for %s", arch)
		}
	}
}

// TestPackagesActivateNothing requires all files below /usr: no configuration, and no unit that is enabled.
func TestPackagesActivateNothing(t *testing.T) {
	r := &release{options: options{version: "1.2.3", source: "../.."}, stage: t.TempDir()}
	for _, d := range []distribution{debian, fedora} {
		files, err := r.packageFiles("amd64", d)
		if err != nil || len(files) < 10 {
			t.Fatalf("files of the %s: got %d (%v)", d.packager, len(files), err)
		}
		for _, f := range files {
			if !strings.HasPrefix(f.name, "/usr/") || strings.Contains(f.name, ".wants/") {
				t.Errorf("%s: has %s, want files below /usr, and no enabled unit", d.packager, f.name)
			}
		}
	}
}

// TestScripts lets a shell read the maintainer scripts, in which nothing may be left to fill in.
func TestScripts(t *testing.T) {
	for _, d := range []distribution{debian, fedora} {
		r := &release{options: options{source: "../.."}, stage: t.TempDir()}
		scripts, err := r.scripts(d, 9)
		if err != nil || len(scripts) != 4 {
			t.Fatalf("scripts of the %s: got %q (%v), want 4", d.packager, scripts, err)
		}
		for _, script := range scripts {
			text, err := os.ReadFile(script)
			if err != nil || bytes.Contains(text, []byte("@")) {
				t.Errorf("%s: want nothing between @ (%v):\n%s", script, err, text)
			}
			if out, err := exec.Command("sh", "-n", script).CombinedOutput(); err != nil {
				t.Errorf("%s: %v: %s", script, err, out)
			}
		}
	}
}
