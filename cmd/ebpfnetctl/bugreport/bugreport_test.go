package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
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
	for _, text := range []string{"", "token: x", `{"a": 1} {"b": 2}`, `{"password": "x`, strings.Repeat("[", 20_000)} {
		if got, err := redactJSON([]byte(text)); err == nil || len(got) > 0 {
			t.Errorf("%.20s: got %s (%v), want an error alone", text, got, err)
		}
	}
	plain := "{\n  \"addresses\": [\n    {\n      \"address\": \"10.88.0.2\"\n    }\n  ]\n}\n"
	if got, err := redactJSON([]byte(plain)); err != nil || string(got) != plain {
		t.Errorf("got %s (%v), want it as it was", got, err)
	}
}

// TestRedactText keeps lines and columns, and nothing that a terminal obeys.
func TestRedactText(t *testing.T) {
	got := string(redactText([]byte("a\tb\x1b[2J\npassword=hunter2 10.88.0.2\n")))
	if want := "a\tb\\x1b[2J\npassword=" + leftOut + " 10.88.0.2\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestConfigWithoutSecret converts the configuration, whose other members stay.
func TestConfigWithoutSecret(t *testing.T) {
	c := bpf.HostConfig{Abi: 8, Build: 255, Secret: [2]uint64{0xdeadbeef, 0xdeadbeef}}
	text, err := json.Marshal(plain(reflect.ValueOf(c)))
	if err != nil || strings.Contains(string(text), "3735928559") || !strings.Contains(string(text), `"build":"00000000000000ff"`) ||
		!strings.Contains(string(text), `"secret":"`+leftOut+`"`) {
		t.Errorf("got %s (%v), want no secret", text, err)
	}
}

// TestArchive is bounded: by file, and in sum. What is cut says so.
func TestArchive(t *testing.T) {
	var out bytes.Buffer
	a := newArchive(&out)
	a.add("empty.txt", nil, nil)
	a.add("failed.txt", nil, errors.New("no\naccess \x1b"))
	for range mostOfAll/mostOfFile + 2 {
		a.add("large.txt", make([]byte, mostOfFile+1), nil)
	}
	if err := a.close(); err != nil {
		t.Fatal(err)
	}
	sizes, said := map[string]int64{}, map[string]string{}
	zip, err := gzip.NewReader(&out)
	if err != nil {
		t.Fatal(err)
	}
	for all := tar.NewReader(zip); ; {
		header, err := all.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(all)
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(header.Name, "ebpfnet-bugreport/")
		sizes[name] += header.Size
		said[name] = string(text[:min(len(text), 100)])
	}
	if sizes["large.txt"] != mostOfAll || !strings.HasPrefix(said["large.txt.error"], "cut: it has ") {
		t.Errorf("large files: got %d bytes, %q; want %d, and that they are cut", sizes["large.txt"], said["large.txt.error"], mostOfAll)
	}
	if _, isThere := sizes["empty.txt"]; !isThere || said["failed.txt.error"] != "no; access \\x1b\n" {
		t.Errorf("got %q, want an empty file and an error", said)
	}
	if n := len(a.report.Failed); n != mostOfAll/mostOfFile+3 {
		t.Errorf("got %d failures, want one of each file but the empty one", n)
	}
}

// TestWriteFails reports what cannot be written, and who ends it.
func TestWriteFails(t *testing.T) {
	nothing := Options{Metrics: []string{"-test.run=^$"}, ConfDir: t.TempDir()} // of this program, which is not ebpfnetctl
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
