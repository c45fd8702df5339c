package conformance

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// scriptIPAM installs an IPAM plugin of that name that writes the verbs it is called with into a file, and
// then does what a script of the shell says.
func scriptIPAM(t *testing.T, name, script string) (dir string, verbs func() string) {
	t.Helper()
	dir = t.TempDir()
	log := filepath.Join(dir, "verbs")
	text := "#!/bin/sh\nprintf '%s ' \"$CNI_COMMAND\" >>" + log + "\n" + script + "\n"
	if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir, func() string {
		said, err := os.ReadFile(log)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(said))
	}
}

// TestDelegateFails: whatever another IPAM plugin does wrong, its own error and code reach the
// runtime, its DEL is called, and nothing is left.
func TestDelegateFails(t *testing.T) {
	const onAdd = `[ "$CNI_COMMAND" = ADD ] || exit 0; `

	h := newHost(t)
	for _, test := range []struct {
		name, script string
		deadline     time.Duration
		code         uint
		words        []string
	}{
		{"its own error", onAdd + `echo '{"code": 117, "msg": "the cellar is empty"}'; exit 1`, testenv.Timeout, 117, []string{"the cellar is empty"}},
		{"no addresses", onAdd + `echo '{"cniVersion": "1.1.0"}'`, testenv.Timeout, codeInternal, []string{"no address"}},
		{"no result", onAdd + `echo none`, testenv.Timeout, codeInternal, nil},
		{"no answer", onAdd + `exec sleep 1000`, 2 * time.Second, codeTryAgain, []string{"in time"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var verbs func() string
			h.path, verbs = scriptIPAM(t, "scripted", test.script)
			p := h.pod(t, "c1", with(single("1.1.0"), "ipam", object{"type": "scripted"}))
			before := h.state(t, p.Namespace)
			call, stopped := p.addAs(t, role{Deadline: test.deadline})
			if stopped {
				t.Fatal("ADD did not end")
			}
			call.Stderr = nil // the steps
			wantError(t, call, test.code, append(test.words, `ipam.type "scripted"`)...)
			h.wantState(t, before, p.Namespace)
			if got := verbs(); got != "ADD DEL" {
				t.Errorf("the IPAM plugin was called for %s, want ADD DEL", got)
			}
		})
	}
}

// TestDelegateVerbs: each verb goes on to the other IPAM plugin with the whole configuration; its words on
// stderr, or its error, come back.
func TestDelegateVerbs(t *testing.T) {
	h := newHost(t)
	var verbs func() string
	h.path, verbs = scriptIPAM(t, "scripted", `cd $(dirname "$0"); cat >stdin; echo "of the cellar" >&2
		if [ -e fail ]; then echo '{"code": 117, "msg": "the cellar is closed"}'; exit 1; fi
		if [ "$CNI_COMMAND" = ADD ]; then echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.88.0.9/24"}]}'; fi`)
	p := h.pod(t, "c1", with(single("1.1.0"), "ipam", object{"type": "scripted", "key": "of its own"}))
	before := h.state(t, p.Namespace)
	for _, fails := range []bool{false, true} {
		for _, verb := range []string{"ADD", "CHECK", "STATUS", "GC", "DEL"} {
			conf := p.conf
			if verb == "CHECK" {
				conf = with(conf, "prevResult", p.result)
			}
			call := h.call(t, p.env(verb), encode(t, conf))
			got, err := os.ReadFile(filepath.Join(h.path, "stdin"))
			if err != nil || string(got) != string(encode(t, conf)) {
				t.Errorf("%s: the plugin reads %s (%v), want %s", verb, got, err, encode(t, conf))
			}
			if !fails && string(call.Stderr) != "of the cellar\n" { // with an error it is the library that keeps them
				t.Errorf("%s: stderr is %q", verb, call.Stderr)
			}
			call.Stderr = nil
			if fails && verb == "CHECK" { // with what else it finds
				wantError(t, call, cnierr.CodeDiffers, "the cellar is closed")
			} else if fails {
				wantError(t, call, 117, "the cellar is closed")
			} else if wantSuccess(t, call, anything); verb == "ADD" {
				p.result, _ = decode(t, call.Stdout).(object)
			}
		}
		h.wantState(t, before, p.Namespace)
		if err := os.WriteFile(filepath.Join(h.path, "fail"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Remove(filepath.Join(h.path, "fail")); err != nil {
		t.Fatal(err)
	}
	if got, want := verbs(), "ADD CHECK STATUS GC DEL ADD DEL CHECK STATUS GC DEL"; got != want {
		t.Errorf("the plugin was called for %s, want %s", got, want)
	}
}

// delegates are ways to other IPAM plugins: dhcp is asked by the interface, and others before it is there.
var delegates = []string{"scripted", "dhcp"}

const givesAddress = `if [ "$CNI_COMMAND" = ADD ]; then echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.88.0.9/24", "gateway": "10.88.0.1"}]}'; fi`

// TestFailedAddDelegated is TestFailedAdd with addresses of others.
func TestFailedAddDelegated(t *testing.T) {
	h := newHost(t)
	for _, kind := range delegates {
		t.Run(kind, func(t *testing.T) {
			h.path, _ = scriptIPAM(t, kind, givesAddress)
			p := h.pod(t, "c1", with(with(single("1.1.0"), "ipam", object{"type": kind}), "runtimeConfig.portMappings", webPort))
			before := h.state(t, p.Namespace)
			for _, step := range stepsOfAdd(t, p) {
				t.Run("before "+step, func(t *testing.T) { failAndRetry(t, p, before, role{FailBefore: step}) })
			}
			t.Run("in print the result", func(t *testing.T) { failAndRetry(t, p, before, role{FailPrint: true}) })
		})
	}
}

// TestKilledDelegated kills ADD before each of its steps. A DEL leaves nothing, and the ADD after it works.
func TestKilledDelegated(t *testing.T) {
	h := newHost(t)
	for _, kind := range delegates {
		t.Run(kind, func(t *testing.T) {
			h.path, _ = scriptIPAM(t, kind, givesAddress)
			p := h.pod(t, "c1", with(with(single("1.1.0"), "ipam", object{"type": kind}), "runtimeConfig.portMappings", webPort))
			before := h.state(t, p.Namespace)
			for _, step := range stepsOfAdd(t, p) {
				t.Run("before "+step, func(t *testing.T) {
					if call, stopped := p.addAs(t, role{KillBefore: step}); stopped || call.Exit != -1 {
						t.Fatalf("ADD was not killed: %+v", call)
					}
					p.del(t)
					h.wantState(t, before, p.Namespace)
					p.add(t)
					p.del(t)
					h.wantState(t, before, p.Namespace)
				})
			}
		})
	}
}

// byEachDelegate has a container with addresses of each kind of IPAM plugin, whose verbs are told. In the
// end nothing may be left of it.
func byEachDelegate(t *testing.T, story func(t *testing.T, p *pod, verbs func() string)) {
	t.Helper()
	h := newHost(t)
	for _, kind := range delegates {
		t.Run(kind, func(t *testing.T) {
			var verbs func() string
			h.path, verbs = scriptIPAM(t, kind, givesAddress)
			p := h.pod(t, "c1", with(single("1.1.0"), "ipam", object{"type": kind}))
			before := h.state(t, p.Namespace)
			p.add(t)
			story(t, p, verbs)
			h.wantState(t, before, p.Namespace)
		})
	}
}

// TestRestartDelegated has no reservation of its own to tell of a container that was here before: it
// is replaced if it is dead, and only then.
func TestRestartDelegated(t *testing.T) {
	byEachDelegate(t, func(t *testing.T, p *pod, verbs func() string) {
		wantError(t, p.try(t, "ADD"), codeUnsupported) // prevResult is another plugin's, for an ADD
		result := p.result
		p.result = nil
		wantError(t, p.try(t, "ADD"), cnierr.CodeAttachmentExists, "c1")
		p.result = result
		wantSuccess(t, p.try(t, "CHECK"), "")
		if err := p.Netlink().LinkDel(p.device(t)); err != nil {
			t.Fatal(err)
		}
		p.add(t)
		wantSuccess(t, p.try(t, "CHECK"), "")
		wantPing(t, p.host.Node, addresses(parseResult(t, encode(t, p.result)))...)
		p.del(t)
		if got, want := verbs(), "ADD CHECK DEL ADD CHECK DEL"; got != want {
			t.Errorf("the plugin was called for %s, want %s", got, want)
		}
	})
}

// TestUnloadedDelegated: a container that lives keeps its addresses when it is added twice, also where nothing
// is loaded that would tell of them.
func TestUnloadedDelegated(t *testing.T) {
	byEachDelegate(t, func(t *testing.T, p *pod, verbs func() string) {
		p.host.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
		result := p.result
		p.result = nil
		wantError(t, p.try(t, "ADD"), cnierr.CodeAttachmentExists, "c1")
		if got := verbs(); got != "ADD" {
			t.Errorf("the plugin was called for %s, want ADD", got)
		}
		p.result = result
		p.del(t)
	})
}
