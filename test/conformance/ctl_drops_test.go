package conformance

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// withoutTracefs calls do on a machine whose kernel shows no tracepoints.
func withoutTracefs(t *testing.T, do func()) {
	t.Helper()
	mounts := map[string]string{"/sys/kernel/tracing": "tracefs", "/sys/kernel/debug": "debugfs"}
	for dir, kind := range mounts {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Fatalf("unmount %s: %v", dir, err)
		}
		defer func() { // also if do ends the test
			if err := unix.Mount(kind, dir, kind, 0, ""); err != nil {
				t.Errorf("mount %s: %v", dir, err)
			}
		}()
	}
	do()
}

func (h *host) run(t *testing.T, line string) {
	t.Helper()
	words := strings.Fields(line)
	if out, err := h.Node.Run(testenv.Context(t), words[0], words[1:]...); err != nil {
		t.Fatalf("%s: %v: %s", line, err, out)
	}
}

// TestCtlDropsOfStack has the host's firewall drop a container's packets: printed once each, with the kernel's reason.
// What a program drops, or ends without a loss, is not reported by the stack again.
func TestCtlDropsOfStack(t *testing.T) {
	s := newScript(t)
	h := s.host
	web, other := s.runtime.NewPod(t, "web"), s.runtime.AddPod(t, "other", nil)
	web.Conf.Args = [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAMESPACE", "shop"}, {"K8S_POD_NAME", "web-0"}}
	testenv.Must(t, web.Add(testenv.Context(t)))
	defer func() {
		testenv.NoError(t, web.Del(testenv.Context(t)))
	}()
	h.run(t, "nft add table inet fw")
	h.run(t, "nft add chain inet fw forward { type filter hook forward priority 0 ; }")
	h.run(t, "nft add rule inet fw forward udp dport 9 drop")
	version, err := testenv.KernelVersion()
	testenv.Must(t, err)

	hasReasons := !version.Less(testenv.Version{Major: 5, Minor: 17})
	withoutTracefs(t, func() {
		f := h.follow(t)
		f.stop(t)
		if warning := f.errs.String(); strings.Count(warning, "\n") != 1 || !strings.Contains(warning, "mount -t tracefs") {
			t.Errorf("without tracefs: got %q on stderr, want one line that says what to mount", warning)
		}
	})
	f := h.follow(t, "--cache-dir", s.runtime.CacheDir, "--bytes", "20", "web")
	for _, family := range testenv.Families {
		remote := netip.AddrPortFrom(family.Outside, 9)
		for from, local := range map[*testenv.Pod]netip.AddrPort{web: netip.AddrPortFrom(family.Pod(web), 4000), other: {}} {
			conn, err := from.DialFrom(testenv.Context(t), "udp", local, remote)
			testenv.Must(t, err)
			defer conn.Close()
			if _, err := conn.Write([]byte("dropped")); err != nil {
				t.Fatal(err)
			}
		}
		got := f.want(t, family.Name+" by the firewall", func(d drops.Drop) bool { return d.Destination == remote.String() })
		wantReason := "NETFILTER_DROP"
		if !hasReasons {
			wantReason = ""
		}
		ipVersion := map[bool]string{true: "4", false: "6"}[family.Is4()]
		if got.By != "stack" || got.Reason != wantReason || got.Function == "" || got.ContainerID != "web" || got.Name != "shop/web-0" ||
			got.Source != netip.AddrPortFrom(family.Pod(web), 4000).String() || got.Peer != remote.String() || got.Protocol != "udp" ||
			got.Length == 0 || len(got.Bytes) != 2*20 || !strings.HasPrefix(got.Bytes, ipVersion) {
			t.Errorf("got %+v, want %s of web", got, wantReason)
		}

		unassigned := netip.AddrPortFrom(family.PodSubnet.Addr().Next().Next().Next().Next(), 9)
		conn, err := web.DialFrom(testenv.Context(t), "udp", netip.AddrPort{}, unassigned)
		if err == nil {
			defer conn.Close()
			_, err = conn.Write([]byte("refused"))
		}
		testenv.Must(t, err)
		f.want(t, family.Name+" to an unassigned address", func(d drops.Drop) bool {
			return d.Destination == unassigned.String() && d.Meaning == "no container has the destination address"
		})
	}
	const forged = 5
	for range forged {
		testenv.Must(t, web.SendFrames(testenv.PodIfName, make([]byte, 60)))
	}
	all := func() []drops.Drop { return withoutMulticast(f.list()) }
	testenv.Eventually(t, "the forged frames", func() error {
		if n := len(all()); n < forged+2*len(testenv.Families) {
			return fmt.Errorf("got %d drops", n)
		}
		return nil
	})
	f.stop(t)
	if len(all()) != forged+2*len(testenv.Families) || len(f.leftOut) > 0 {
		t.Errorf("got %+v, and left out %v; want %d drops", all(), f.leftOut, forged+2*len(testenv.Families))
	}
	for _, d := range all() {
		if isForged := d.Source == ""; isForged != (d.By == "datapath") {
			t.Errorf("got %+v, want what a program drops to be reported by it alone", d)
		}
	}
	if !hasReasons {
		if warning := f.errs.String(); strings.Count(warning, "\n") != 1 || !strings.Contains(warning, "5.17") {
			t.Errorf("got %q on stderr, want one line: since when the kernel has reasons", warning)
		}
		return
	}
	if warning := f.errs.String(); warning != "" {
		t.Errorf("got %q on stderr, want nothing", warning)
	}
	only := h.follow(t, "--reason", "NETFILTER_DROP")
	conn, err := other.Dial(testenv.Context(t), "udp", netip.AddrPortFrom(testenv.IPv4.Outside, 9))
	testenv.Must(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte("dropped"))
	testenv.Must(t, errors.Join(web.SendFrames(testenv.PodIfName, make([]byte, 60)), err))
	got := only.want(t, "by the firewall", func(d drops.Drop) bool { return d.ContainerID == "other" })
	only.stop(t)
	if all := only.list(); len(all) != 1 || got.Reason != "NETFILTER_DROP" {
		t.Errorf("--reason NETFILTER_DROP: got %+v, want one", all)
	}
}

// TestCtlDropsOfPolicy has rules refuse packets: each line names the direction, and the rule that nearly admits it.
func TestCtlDropsOfPolicy(t *testing.T) {
	s := newScript(t)
	web := s.runtime.AddPod(t, "web", map[string]any{"portMappings": []any{map[string]any{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}})
	client := s.runtime.AddPod(t, "client", nil)
	const text = `{"egress": [{"to": [{"network": "db"}], "ports": [{"port": 7002}]}, {"to": [{"cidr": "%s/32"}, {"cidr": "%s/128"}], "ports": [{"port": 53}]}],
		"ingress": [{"from": [{"network": "db"}], "ports": [{"port": 80}]}]}`
	file := filepath.Join(t.TempDir(), "policy.json")
	testenv.Must(t, os.WriteFile(file, fmt.Appendf(nil, text, testenv.OutsideAddr4, testenv.OutsideAddr6), 0o600))
	s.host.wantCtl(t, 0, []string{"set", "pods/web", "policy=" + file})
	f := s.host.follow(t)
	for _, mode := range []string{"enforce", "audit"} {
		s.host.wantCtl(t, 0, []string{"set", "pods/web", "policyMode=" + mode})
		for _, family := range testenv.Families {
			for to, c := range map[netip.AddrPort]struct {
				from         *testenv.Namespace
				ruleSet, why string
			}{
				netip.AddrPortFrom(family.Outside, 7001):     {web.Namespace, "egress", "policy.egress[1] admits the peer, but not tcp 7001"},
				netip.AddrPortFrom(family.Pod(client), 7002): {web.Namespace, "egress", "policy.egress[0] admits tcp 7002, but not the peer"},
				netip.AddrPortFrom(family.Node, 8080):        {s.host.Outside, "ingress", "policy.ingress[0] admits tcp 80, but not the peer"},
				netip.AddrPortFrom(family.Pod(web), 81):      {client.Namespace, "ingress", "no rule admits the peer, or tcp 81"},
			} {
				ctx, cancel := context.WithCancel(testenv.Context(t))
				go func() { // until the drop is there
					if conn, err := c.from.Dial(ctx, "tcp", to); err == nil {
						conn.Close()
					}
				}()
				reason := map[string]string{"enforce": "policy-" + c.ruleSet, "audit": "policy-audit"}[mode]
				got := f.want(t, to.String()+" "+reason, func(d drops.Drop) bool { return d.Destination == to.String() && d.Reason == reason })
				cancel()
				if got.ContainerID != "web" || got.RuleSet != c.ruleSet || got.Why != c.why {
					t.Errorf("got %+v, want %s: %s", got, c.ruleSet, c.why)
				}
			}
		}
	}
	f.stop(t)
}

// TestCtlDropsOneReader has a second reader refused, and a killed one forgotten.
func TestCtlDropsOneReader(t *testing.T) {
	s := newScript(t)
	h := s.host
	web := s.runtime.AddPod(t, "web", nil)
	forged := uint64(0)
	forge := func() {
		forged++
		testenv.Must(t, web.SendFrames(testenv.PodIfName, make([]byte, 60)))
	}
	first := h.follow(t)
	exit, stdout, stderr := h.ctl(t, "drops", "--follow")
	if want := fmt.Sprintf("(process %d)", first.cmd.Process.Pid); exit != 1 || stdout != "" || !strings.Contains(stderr, want) {
		t.Errorf("second reader: got exit code %d, %q, %q; want 1 and %s", exit, stdout, stderr, want)
	}
	forge()
	first.want(t, "of the first reader", func(d drops.Drop) bool { return d.Reason == "mac" })

	testenv.Must(t, first.cmd.Process.Kill())
	<-first.done
	var last bpf.DropReader
	testenv.Eventually(t, "the killed reader to be forgotten", func() error {
		forge()
		if last = h.dropReader(t); last.Until != 0 {
			return fmt.Errorf("got %+v", last)
		}
		return nil
	})
	h.awaitForged(t, forged)
	next := h.follow(t)
	forge()
	got := next.want(t, "of the next reader", func(d drops.Drop) bool { return d.Reason == "mac" })
	next.stop(t)
	if all := withoutMulticast(next.list()); len(all) != 1 || h.dropTotals(t)["mac"] != forged {
		t.Errorf("got %+v after %+v, want the one drop since: %d of before are not printed", all, got, forged-1)
	}
}

// TestCtlDropsClosedOutput ends the command when nobody reads it any more, with and without a drop to print, and leaves
// no reader. What cannot be written for another reason is an error.
func TestCtlDropsClosedOutput(t *testing.T) {
	s := newScript(t)
	web := s.runtime.AddPod(t, "web", nil)
	forge := func() error { return web.SendFrames(testenv.PodIfName, make([]byte, 60)) }
	for _, format := range []string{"text", "json"} {
		for name, end := range map[string]func(p *os.Process, read *os.File) error{
			"without a drop": func(_ *os.Process, read *os.File) error { return read.Close() },
			"with a drop": func(p *os.Process, read *os.File) error {
				return errors.Join(p.Signal(unix.SIGSTOP), forge(), read.Close(), p.Signal(unix.SIGCONT))
			},
		} {
			t.Run(format+" "+name, func(t *testing.T) {
				read, write, err := os.Pipe()
				testenv.Must(t, err)
				cmd, stderr := s.host.followTo(t, write, format)
				testenv.Must(t, errors.Join(write.Close(), forge()))
				line, err := bufio.NewReader(read).ReadString('\n')
				if err != nil || !strings.Contains(line, "web") {
					t.Errorf("got %q (%v), want the container", line, err)
				}
				if err := errors.Join(end(cmd.Process, read), cmd.Wait()); err != nil || stderr.Len() > 0 {
					t.Errorf("got %v, %q; want exit code 0, and nothing", err, stderr)
				}
				s.host.wantNoDropReader(t)
			})
		}
		t.Run(format+" to a full disk", func(t *testing.T) {
			full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
			testenv.Must(t, err)
			defer full.Close()
			cmd, stderr := s.host.followTo(t, full, format)
			testenv.Must(t, forge())
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(stderr.String(), "no space left on device") {
				t.Errorf("got exit code %d, %q; want 1, and why", code, stderr)
			}
			s.host.wantNoDropReader(t)
		})
	}
}
