package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestLog calls ADD, a CHECK that fails, and DEL. The log has what its level selects, and the output is the same as
// without a log.
func TestLog(t *testing.T) {
	h := newHost(t)
	const (
		add    = `level=INFO msg=ADD pid=`
		failed = `level=ERROR msg="CHECK failed"`
		del    = `level=INFO msg=DEL`
		step   = `level=DEBUG msg="create the veth pair"`
	)
	for _, test := range []struct {
		name      string
		key, env  bool // which of them names the file
		level     any
		has, lack []string
	}{
		{"key", true, false, absent, []string{add, failed, del, "network=pods container=c1 interface=eth0 netns=/run/netns/", "took=", "version=devel", "traceparent=00-0af7651916cd43dd8448eb211c80319c", "code=7", "prevResult"}, []string{step}},
		{"CNI_LOG_FILE", false, true, absent, []string{add, failed, del}, []string{step}},
		{"key before CNI_LOG_FILE", true, true, absent, []string{add, failed, del}, []string{step}},
		{"debug", true, false, "debug", []string{add, failed, del, step}, nil},
		{"warn", true, false, "warn", []string{failed}, []string{add, del, step}},
		{"error", true, false, "error", []string{failed}, []string{add, del, step}},
	} {
		t.Run(test.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "ebpfnet.log")
			conf := with(single("1.1.0"), "logLevel", test.level)
			if test.key {
				conf = with(conf, "logFile", file)
			}
			p := h.pod(t, "c1", conf)
			call := func(verb string) []byte {
				env := p.env(verb)
				if test.env {
					env["CNI_LOG_FILE"] = file
				}
				if test.key && test.env {
					env["CNI_LOG_FILE"] = "/run/other.log"
				}
				env["TRACEPARENT"] = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
				call := h.call(t, env, encode(t, p.conf))
				if len(call.Stderr) > 0 {
					t.Errorf("stderr of %s: got %s, want nothing", verb, call.Stderr)
				}
				return call.Stdout
			}
			parseResult(t, call("ADD"))
			call("CHECK") // without prevResult
			if stdout := call("DEL"); len(stdout) > 0 {
				t.Errorf("stdout of DEL: got %s, want nothing", stdout)
			}
			wantLog(t, file, test.has, test.lack)
			if _, err := os.Stat("/run/other.log"); err == nil {
				t.Error("/run/other.log exists, want only the file of key logFile")
			}
		})
	}
}

func wantLog(t *testing.T, file string, has, lacks []string) {
	t.Helper()
	text := testenv.ReadFile(t, file)
	for _, words := range has {
		if !strings.Contains(string(text), words) {
			t.Errorf("log: want %q in:\n%s", words, text)
		}
	}
	for _, words := range lacks {
		if strings.Contains(string(text), words) {
			t.Errorf("log: want no %q in:\n%s", words, text)
		}
	}
}

// TestLogOnStderr checks that stdout has nothing but the result, that ADD works without a writable log file, and that
// DEL accepts log keys that ADD refuses.
func TestLogOnStderr(t *testing.T) {
	h := newHost(t)
	for _, test := range []struct {
		name string
		conf object
		word string // on stderr
		file any    // for DEL
	}{
		{"level without file", with(single("1.1.0"), "logLevel", "debug"), "create the veth pair", 7},
		{"file that cannot be written", with(single("1.1.0"), "logFile", "/run/absent/log"), `logFile \"/run/absent/log\": expected a file that can be written`, makePipe(t)},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := h.pod(t, "c1", test.conf)
			call := p.try(t, "ADD")
			parseResult(t, call.Stdout)
			if !strings.Contains(string(call.Stderr), test.word) {
				t.Errorf("stderr: got %s, want %q", call.Stderr, test.word)
			}
			before := h.snapshot(t)
			p.conf = with(with(p.conf, "logFile", test.file), "logLevel", "loud")
			wantSuccess(t, p.try(t, "DEL"), "")
			if _, removed := before.Compare(h.snapshot(t)); len(removed) == 0 {
				t.Error("removed by DEL: got nothing, want the container's state")
			}
		})
	}
}
