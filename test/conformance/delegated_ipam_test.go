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

// installIPAMScript installs an IPAM plugin that logs its verbs and then runs a shell script. verbs returns them.
func installIPAMScript(t *testing.T, name, script string) (dir string, verbs func() string) {
	t.Helper()
	dir = t.TempDir()
	log := filepath.Join(dir, "verbs")
	text := "#!/bin/sh\nprintf '%s ' \"$CNI_COMMAND\" >>" + log + "\n" + script + "\n"
	testenv.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(text), 0o755))
	return dir, func() string {
		return strings.TrimSpace(string(testenv.ReadFile(t, log)))
	}
}

// TestDelegatedIPAMFails makes another IPAM plugin fail. Its error and code reach the runtime, its DEL is
// called, and ADD leaves nothing.
func TestDelegatedIPAMFails(t *testing.T) {
	const onAdd = `[ "$CNI_COMMAND" = ADD ] || exit 0; `

	h := newHost(t)
	for _, test := range []struct {
		name, script string
		deadline     time.Duration
		code         uint
		words        []string
	}{
		{"its own error", onAdd + `echo '{"code": 117, "msg": "no address left"}'; exit 1`, testenv.Timeout, 117, []string{"no address left"}},
		{"no addresses", onAdd + `echo '{"cniVersion": "1.1.0"}'`, testenv.Timeout, codeInternal, []string{"no address"}},
		{"no result", onAdd + `echo none`, testenv.Timeout, codeInternal, nil},
		{"timeout", onAdd + `exec sleep 1000`, 2 * time.Second, codeTryAgain, []string{"in time"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var verbs func() string
			h.path, verbs = installIPAMScript(t, "scripted", test.script)
			p := h.pod(t, "c1", with(single("1.1.0"), "ipam", object{"type": "scripted"}))
			before := h.snapshot(t, p.Namespace)
			var call *testenv.Call
			for deadline := test.deadline; call == nil || deadline < testenv.Timeout && !strings.Contains(string(call.Stdout), "scripted"); deadline *= 2 {
				_ = os.Remove(filepath.Join(h.path, "verbs")) // of a call that was too slow to come as far
				var stopped bool
				if call, stopped = p.addWithFault(t, fault{Deadline: deadline}); stopped {
					t.Fatal("ADD did not end in time")
				}
			}
			call.Stderr = nil // has the steps
			wantError(t, call, test.code, append(test.words, `ipam.type "scripted"`)...)
			h.wantUnchanged(t, before, p.Namespace)
			if got := verbs(); got != "ADD DEL" {
				t.Errorf("calls of the IPAM plugin: got %s, want ADD DEL", got)
			}
		})
	}
}

// TestDelegatedIPAMVerbs checks that every verb is passed on to the other IPAM plugin with the whole configuration,
// and that its stderr and its error are returned. A CHECK that it does not finish in time finds no difference.
func TestDelegatedIPAMVerbs(t *testing.T) {
	h := newHost(t)
	var verbs func() string
	h.path, verbs = installIPAMScript(t, "scripted", `cd $(dirname "$0"); cat >stdin; echo "from ipam" >&2
		if [ -e hang ]; then exec sleep 1000; fi
		if [ -e fail ]; then echo '{"code": 117, "msg": "out of service"}'; exit 1; fi
		if [ "$CNI_COMMAND" = ADD ]; then echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.88.0.9/24"}]}'; fi`)
	p := h.pod(t, "c1", with(single("1.1.0"), "ipam", object{"type": "scripted", "key": "its own"}))
	before := h.snapshot(t, p.Namespace)
	for _, fails := range []bool{false, true} {
		for _, verb := range []string{"ADD", "CHECK", "STATUS", "GC", "DEL"} {
			conf := p.conf
			if verb == "CHECK" {
				conf = with(conf, "prevResult", p.result)
			}
			call := h.call(t, p.env(verb), encode(t, conf))
			got, err := os.ReadFile(filepath.Join(h.path, "stdin"))
			if err != nil || string(got) != string(encode(t, conf)) {
				t.Errorf("stdin of the IPAM plugin's %s: got %s (%v), want %s", verb, got, err, encode(t, conf))
			}
			if !fails && string(call.Stderr) != "from ipam\n" { // the CNI library drops it after an error
				t.Errorf("%s: got %q on stderr, want the IPAM plugin's", verb, call.Stderr)
			}
			call.Stderr = nil
			if fails && verb == "CHECK" { // which adds its own differences
				wantError(t, call, cnierr.CodeDiffers, "out of service")
			} else if fails {
				wantError(t, call, 117, "out of service")
			} else if wantSuccess(t, call, anything); verb == "ADD" {
				p.result, _ = decode(t, call.Stdout).(object)
			}
		}
		h.wantUnchanged(t, before, p.Namespace)
		testenv.Must(t, os.WriteFile(filepath.Join(h.path, "fail"), nil, 0o600))
	}
	testenv.Must(t, os.Rename(filepath.Join(h.path, "fail"), filepath.Join(h.path, "hang")))
	call, stopped := p.callWithFault(t, "CHECK", fault{Deadline: 2 * time.Second})
	testenv.Must(t, os.Remove(filepath.Join(h.path, "hang")))
	if stopped {
		t.Fatal("CHECK did not end in time")
	}
	wantError(t, call, codeTryAgain, "in time", `ipam.type "scripted"`)
	if got, want := verbs(), "ADD CHECK STATUS GC DEL ADD DEL CHECK STATUS GC DEL CHECK"; got != want {
		t.Errorf("calls of the IPAM plugin: got %s, want %s", got, want)
	}
}

// delegates are names of IPAM plugins: ADD calls dhcp after it has created the interface, others before.
var delegates = []string{"scripted", "dhcp"}

const assignAddress = `if [ "$CNI_COMMAND" = ADD ]; then echo '{"cniVersion": "1.1.0", "ips": [{"address": "10.88.0.9/24", "gateway": "10.88.0.1"}]}'; fi`

// TestInterruptedAddWithDelegatedIPAM fails and kills ADD before each of its steps. A failed ADD, or DEL after a killed
// one, leaves nothing, and the next ADD works.
func TestInterruptedAddWithDelegatedIPAM(t *testing.T) {
	h := newHost(t)
	for _, kind := range delegates {
		t.Run(kind, func(t *testing.T) {
			h.path, _ = installIPAMScript(t, kind, assignAddress)
			p := h.pod(t, "c1", with(with(single("1.1.0"), "ipam", object{"type": kind}), "runtimeConfig.portMappings", webPort))
			before := h.snapshot(t, p.Namespace)
			for _, step := range learnAddSteps(t, p) {
				t.Run("before "+step, func(t *testing.T) { failAndRetry(t, p, before, fault{FailBefore: step}) })
				t.Run("killed before "+step, func(t *testing.T) {
					if call, stopped := p.addWithFault(t, fault{KillBefore: step}); stopped || call.Exit != -1 {
						t.Fatalf("ADD: got %+v, want SIGKILL", call)
					}
					p.del(t)
					h.wantUnchanged(t, before, p.Namespace)
					p.add(t)
					p.del(t)
					h.wantUnchanged(t, before, p.Namespace)
				})
			}
			t.Run("print the result", func(t *testing.T) { failAndRetry(t, p, before, fault{FailPrint: true}) })
		})
	}
}

// forEachDelegate adds a container with each kind of IPAM plugin, whose verbs it passes on, and runs test. The test
// must leave nothing of the container.
func forEachDelegate(t *testing.T, test func(t *testing.T, p *pod, verbs func() string)) {
	t.Helper()
	h := newHost(t)
	for _, kind := range delegates {
		t.Run(kind, func(t *testing.T) {
			var verbs func() string
			h.path, verbs = installIPAMScript(t, kind, assignAddress)
			p := h.pod(t, "c1", with(single("1.1.0"), "ipam", object{"type": kind}))
			before := h.snapshot(t, p.Namespace)
			p.add(t)
			test(t, p, verbs)
			h.wantUnchanged(t, before, p.Namespace)
		})
	}
}

// TestRestartWithDelegatedIPAM repeats ADD, without a reservation that identifies the container. ADD replaces a dead
// attachment, and refuses while one is alive.
func TestRestartWithDelegatedIPAM(t *testing.T) {
	forEachDelegate(t, func(t *testing.T, p *pod, verbs func() string) {
		wantError(t, p.try(t, "ADD"), codeUnsupported) // ADD takes prevResult for another plugin's
		result := p.result
		p.result = nil
		wantError(t, p.try(t, "ADD"), cnierr.CodeAttachmentExists, "c1")
		p.result = result
		wantSuccess(t, p.try(t, "CHECK"), "")
		testenv.Must(t, p.Netlink().LinkDel(p.device(t)))
		p.add(t)
		wantSuccess(t, p.try(t, "CHECK"), "")
		wantPing(t, p.host.Node, addresses(parseResult(t, encode(t, p.result)))...)
		p.del(t)
		if got, want := verbs(), "ADD CHECK DEL ADD CHECK DEL"; got != want {
			t.Errorf("calls of the IPAM plugin: got %s, want %s", got, want)
		}
	})
}

// TestRepeatedAddAfterUnload repeats ADD for a running container. It keeps its addresses, although the unloaded
// datapath no longer knows them.
func TestRepeatedAddAfterUnload(t *testing.T) {
	forEachDelegate(t, func(t *testing.T, p *pod, verbs func() string) {
		p.host.wantCtl(t, 0, []string{"unload", "--yes"}, "unloaded")
		result := p.result
		p.result = nil
		wantError(t, p.try(t, "ADD"), cnierr.CodeAttachmentExists, "c1")
		if got := verbs(); got != "ADD" {
			t.Errorf("calls of the IPAM plugin: got %s, want ADD", got)
		}
		p.result = result
		p.del(t)
	})
}
