package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// TestRedactJSON has a secret in each text, and what must stay beside it.
func TestRedactJSON(t *testing.T) {
	for text, stays := range map[string]string{
		`{"password": "§", "name": "pods"}`:                                                 "pods",
		`{"dbPassWd": ["§", {"a": "§"}], "mtu": 12345678901234567890}`:                      "12345678901234567890",
		`{"k8s_auth_token": "§", "subnet": "10.88.0.0/16"}`:                                 "10.88.0.0/16",
		`{"a": [{"b": {"privateKey": "§"}}], "mac": "02:eb:00:00:00:01"}`:                   "02:eb:00:00:00:01",
		`{"basicAuth": {"user": "§"}, "isGateway": true}`:                                   "isGateway",
		`{"client-key-data": "§", "keys": "shown"}`:                                         "shown",
		`{"key": "§", "kind": "shown"}`:                                                     "shown",
		`[{"name": "API_TOKEN", "value": "§"}, {"name": "HOME", "value": "/root"}]`:         "/root",
		`[{"key": "db-password", "value": "§"}, {"key": "app", "value": "web"}]`:            `"key": "app"`,
		`{"endpoint": "https://root:§@192.0.2.1:2379/x"}`:                                   "@192.0.2.1:2379/x",
		`{"args": "--level=debug --token=§ --x"}`:                                           "--level=debug",
		`{"args": "password: '§'; next"}`:                                                   "next",
		`{"header": "Authorization: Bearer §"}`:                                             "header",
		`{"file": "a\n-----BEGIN EC PRIVATE KEY-----\nS\n-----END EC PRIVATE KEY-----\nb"}`: `a\n`,
		`{"file": "-----BEGIN CERTIFICATE-----\nS"}`:                                        "file",
		`{"jwt": "eyJhbGciOiJSUzI1NiJ9.§.x"}`:                                               "jwt",
		`{"data": "LS0tLS1CRUdJTi§", "password": "§"}`:                                      "data",
		`{"password": "§", "password": "§"}`:                                                "password",
	} {
		got, err := redactJSON([]byte(strings.ReplaceAll(text, "§", "hunter2")))
		if err != nil || bytes.Contains(got, []byte("hunter2")) || !bytes.Contains(got, []byte(leftOut)) || !bytes.Contains(got, []byte(stays)) {
			t.Errorf("%s: got %s (%v), want %q without the secret", text, got, err, stays)
		}
	}
	for _, text := range []string{"", "token: x", `{"a": 1} {"b": 2}`, `{"password": "x`, strings.Repeat("[", 20_000), `[{"a": 1}, {"c`} {
		if got, err := redactJSON([]byte(text)); err == nil || len(got) > 0 {
			t.Errorf("%.20s: got %s (%v), want an error alone", text, got, err)
		}
	}
	for _, plain := range []string{"[]\n", "{\n  \"addresses\": [\n    {\n      \"address\": \"10.88.0.2\"\n    }\n  ]\n}\n"} {
		if got, err := redactJSON([]byte(plain)); err != nil || string(got) != plain {
			t.Errorf("got %s (%v), want it as it was", got, err)
		}
	}
}

// TestRedactText keeps lines and tabs, and escapes other control characters.
func TestRedactText(t *testing.T) {
	got := string(redactText([]byte("a\tb\x1b[2J\npassword=hunter2 10.88.0.2\n")))
	if want := "a\tb\\x1b[2J\npassword=" + leftOut + " 10.88.0.2\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestArchive bounds each file, and their sum, and says what is cut.
func TestArchive(t *testing.T) {
	var out bytes.Buffer
	a := newArchive(&out)
	a.add("empty.txt", nil, nil)
	a.add("failed.txt", nil, errors.New("no\naccess \x1b"))
	for range 64 {
		a.add("large.txt", make([]byte, maxSize), nil)
	}
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	files := filesOf(t, &out)
	if n := len(files["large.txt"]); n < maxSize-1 || n > maxSize {
		t.Errorf("large files: got %d bytes, want %d", n, maxSize)
	}
	if _, isThere := files["empty.txt"]; !isThere || files["failed.txt"] != nil {
		t.Error("want an empty file, and none that has failed")
	}
	missing := a.report.Missing
	if len(missing) != 65 || missing[0] != "failed.txt: no; access \\x1b" || missing[1] != fmt.Sprintf("large.txt: cut after %d bytes", maxSize/2) {
		t.Errorf("got %.200q, want why files are missing or cut", missing)
	}
}

// filesOf reads an archive. Files of one name are one.
func filesOf(t *testing.T, archive io.Reader) map[string][]byte {
	t.Helper()
	zip, err := gzip.NewReader(archive)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for all := tar.NewReader(zip); ; {
		header, err := all.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(all)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(header.Name, "ebpfnet-bugreport/")
		files[name] = append(files[name], text...)
	}
}

// TestConfigurations takes those of the runtime's directory, wherever it is.
func TestConfigurations(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"etc/containerd/config.toml": "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.cni]\nconf_dir = '/k3s'\n",
		"etc/crio/crio.conf":         "[crio.network]\nnetwork_dir = '/k3s'\n",
		"k3s/10-pods.conflist":       `{"name": "pods"}`,
	} {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	a := newArchive(&out)
	a.addConfigurations(runtimes.Options{Root: root})
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	files := filesOf(t, &out)
	if text := string(files["cni/10-pods.conflist"]); strings.Count(text, "pods") != 1 || len(files) != 1 || len(a.report.Missing) > 0 {
		t.Errorf("got %q, missing %q; want the list, once", files, a.report.Missing)
	}
}

// TestWriteFails wants an error if nothing can be written, or the report is interrupted.
func TestWriteFails(t *testing.T) {
	nothing := Options{Runtimes: runtimes.Options{ConfDir: t.TempDir()}}
	if _, err := Write(t.Context(), failing{}, nothing); !errors.Is(err, errFull) {
		t.Errorf("got %v, want %v", err, errFull)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if _, err := Write(ctx, io.Discard, nothing); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want %v", err, context.Canceled)
	}
}

var errFull = errors.New("full")

type failing struct{}

func (failing) Write([]byte) (int, error) { return 0, errFull }
