package bugreport

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/bpf"
)

// TestMain is also ebpfnetctl: "many" lists more than a file has room for, and "much" is one value that is too long.
func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && os.Args[1] == "many":
		os.Stdout.WriteString("[\n")
		for n := range manyEntries {
			os.Stdout.WriteString(fmt.Sprintf("{\"flow\": %d, \"more\": [0%s]},\n", n, strings.Repeat(", 0", 500)))
		}
		os.Stdout.WriteString("\"the last\"\n]\n")
	case len(os.Args) > 1 && os.Args[1] == "much":
		os.Stdout.WriteString("{\"a\": 1" + strings.Repeat("0", mostOfFile) + "}")
	default:
		os.Exit(m.Run())
	}
}

const manyEntries = mostOfFile / 1500

// TestCutList keeps the first entries of a list that is too long, as valid JSON, and says how many there were.
func TestCutList(t *testing.T) {
	var out bytes.Buffer
	if _, err := Write(t.Context(), &out, Options{Nouns: [][]string{{"many"}, {"much"}}, Metrics: []string{"-test.run=^$"}, ConfDir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	files := filesOf(t, &out)
	var kept []struct{ Flow int }
	if err := json.Unmarshal(files["nouns/many.json"], &kept); err != nil || len(kept) < 1000 || kept[len(kept)-1].Flow != len(kept)-1 {
		t.Errorf("got %d entries (%v), want the first ones", len(kept), err)
	}
	said := fmt.Sprintf("nouns/many.json: cut: the first %d of %d entries are here\n", len(kept), manyEntries+1)
	if introduction := string(files["README.txt"]); !strings.Contains(introduction, said) || !strings.Contains(introduction, "nouns/much.json: left out: it has ") {
		t.Errorf("README.txt: got %s, want %s", introduction, said)
	}
	if _, isThere := files["nouns/much.json"]; isThere {
		t.Error("nouns/much.json: got half of a value")
	}
}

// TestCutMap keeps as many entries as there is room for.
func TestCutMap(t *testing.T) {
	document := &mapDocument{Type: "Hash", Entries: make([]mapEntry, 10)}
	whole, err := document.text(mostOfFile)
	if err != nil {
		t.Fatal(err)
	}
	text, err := document.text(len(whole) - 1)
	if !json.Valid(text) || err == nil || err.Error() != "cut: the first 5 of 10 entries are here" {
		t.Errorf("got %s (%v), want 5 of 10 entries", text, err)
	}
	if text, err := document.text(20); text != nil || err == nil {
		t.Errorf("room for 20 bytes: got %s (%v), want an error alone", text, err)
	}
}

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
		got, err := redactJSON(strings.NewReader(strings.ReplaceAll(text, "§", "hunter2")), mostOfFile)
		if err != nil || bytes.Contains(got, []byte("hunter2")) || !bytes.Contains(got, []byte(leftOut)) || !bytes.Contains(got, []byte(stays)) {
			t.Errorf("%s: got %s (%v), want %q without the secret", text, got, err, stays)
		}
	}
	for _, text := range []string{"", "token: x", `{"a": 1} {"b": 2}`, `{"password": "x`, strings.Repeat("[", 20_000)} {
		if got, err := redactJSON(strings.NewReader(text), mostOfFile); err == nil || len(got) > 0 {
			t.Errorf("%.20s: got %s (%v), want an error alone", text, got, err)
		}
	}
	half := "[{\"a\": 1}, {\"b\": 2}, {\"c"
	if got, err := redactJSON(strings.NewReader(half), mostOfFile); err == nil || !json.Valid(got) || bytes.Count(got, []byte("{")) != 2 {
		t.Errorf("%s: got %s (%v), want what is whole, and an error", half, got, err)
	}
	plain := "[\n  {\n    \"a\": []\n  },\n  {\n    \"b\": 2\n  }\n]\n"
	for room := range len(plain) {
		want := ""
		if first := "[\n  {\n    \"a\": []\n  }\n]\n"; room >= len(first) {
			want = first
		}
		if got, err := redactJSON(strings.NewReader(plain), room); err == nil || string(got) != want {
			t.Errorf("room for %d: got %q (%v), want %q and an error", room, got, err, want)
		}
	}
	for _, plain := range []string{plain, "[]\n", "{\n  \"addresses\": [\n    {\n      \"address\": \"10.88.0.2\"\n    }\n  ]\n}\n"} {
		if got, err := redactJSON(strings.NewReader(plain), len(plain)); err != nil || string(got) != plain {
			t.Errorf("got %s (%v), want it as it was", got, err)
		}
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
	files := filesOf(t, &out)
	if n, said := len(files["large.txt"]), files["large.txt.error"]; n != mostOfAll || !bytes.HasPrefix(said, []byte("cut: it has ")) {
		t.Errorf("large files: got %d bytes, %.99q; want %d, and that they are cut", n, said, mostOfAll)
	}
	if _, isThere := files["empty.txt"]; !isThere || string(files["failed.txt.error"]) != "no; access \\x1b\n" {
		t.Errorf("got %q, want an empty file and an error", files["failed.txt.error"])
	}
	if n := len(a.report.Failed); n != mostOfAll/mostOfFile+3 {
		t.Errorf("got %d failures, want one of each file but the empty one", n)
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
