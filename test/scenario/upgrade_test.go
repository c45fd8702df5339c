package scenario

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// release returns options that load the embedded programs as those of another version. It has none for uplinks
// without a link layer, which no test here has: a third of the verifier's work.
func release(revision uint32, build uint64) loader.Options {
	programs := loader.Embedded()
	programs.Revision, programs.Build = revision, build
	programs.Spec = func() (*ebpf.CollectionSpec, error) {
		spec, err := bpf.LoadDatapath()
		if err == nil {
			delete(spec.Programs, bpf.ProgFromUplinkL3)
			delete(spec.Programs, bpf.ProgToUplinkL3)
		}
		return spec, err
	}
	return loader.Options{Programs: &programs}
}

func (n *network) upgrade(t *testing.T, options loader.Options) (done loader.Upgraded, err error) {
	t.Helper()
	err = n.node().Do(func() error {
		done, err = loader.Upgrade(testenv.Context(t), options)
		return err
	})
	return done, err
}

// Programs are upgraded and downgraded again and again while connections of all kinds exchange packets. No
// packet is lost or retransmitted. Connections are offloaded here, and bypass the stack without entries in the next test.
func TestUpgradeUnderTraffic(t *testing.T) {
	n := newEstablishedNetwork(t)
	n.upgradeUnderTraffic(t, workload(10, 10, 200))
}

func TestUpgradeUnderTrafficWithClsact(t *testing.T) {
	n := newNetwork(t)
	n.loadForClsact(t)
	n.upgradeUnderTraffic(t, workload(5, 5, 20))
}

func (n *network) upgradeUnderTraffic(t *testing.T, upgrades int) {
	t.Helper()
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	load := n.startTraffic(t, a, web)
	dropped := n.drops(t)
	testenv.NoError(t, load.Lossless(t, func(int) error {
		noneResent := n.countResent(t, a, web)
		for i := range upgrades {
			done, err := n.upgrade(t, release(uint32(i%3), uint64(i+1)))
			if err != nil {
				t.Fatalf("upgrade %d: %v", i+1, err)
			}
			if done.ToBuild != loader.BuildID(i+1) || done.FromBuild == done.ToBuild || done.Programs < 5 {
				t.Fatalf("upgrade %d: got %+v, want at least 5 programs of build %d", i+1, done, i+1)
			}
			n.wantPrograms(t, uint64(done.ToBuild))
			if err := load.More(1); err != nil {
				return fmt.Errorf("upgrade %d: %w", i+1, err)
			}
		}
		return noneResent()
	}))
	load.Stop()
	testenv.DrainBacklog(t)
	if now := n.drops(t); now != dropped {
		t.Errorf("dropped packets: got %d, want none", now-dropped)
	}
}

// wantPrograms wants only the programs of one build to be pinned and attached.
func (n *network) wantPrograms(t *testing.T, build uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		pins := must(filepath.Glob(filepath.Join(datapath.Dir(), "progs", "*", "*")))
		own := map[ebpf.ProgramID]bool{}
		for _, pin := range pins {
			if dir := filepath.Base(filepath.Dir(pin)); dir != fmt.Sprintf("%016x", build) {
				t.Errorf("pinned program %s: want build %016x", pin, build)
			}
			program, err := ebpf.LoadPinnedProgram(pin, nil)
			testenv.Must(t, err)
			defer program.Close()
			own[programID(t, program)] = true
		}
		if datapath.Config.Build != build || len(pins) < 5 {
			t.Errorf("got %d programs of build %x, want at least 5 of %x", len(pins), datapath.Config.Build, build)
		}
		for _, pin := range must(filepath.Glob(filepath.Join(datapath.Dir(), "links", "*"))) {
			attached, err := link.LoadPinnedLink(pin, nil)
			testenv.Must(t, err)
			defer attached.Close()
			info, err := attached.Info()
			testenv.Must(t, err)
			if !own[info.Program] {
				t.Errorf("link %s has program %d, want one of build %x", pin, info.Program, build)
			}
		}
		for _, device := range must(rtnl.Links(n.node().Netlink())) {
			for _, filter := range must(rtnl.Filters(n.node().Netlink(), device, netlink.HANDLE_MIN_INGRESS)) {
				if filter, ok := filter.(*netlink.BpfFilter); ok && !own[ebpf.ProgramID(filter.Id)] {
					t.Errorf("filter %s of %s has program %d, want one of build %x", filter.Name, device.Attrs().Name, filter.Id, build)
				}
			}
		}
	})
}

// ADD installs the programs of its binary, unless newer ones are loaded.
func TestAddUpgrades(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "a", nil)
	own := loader.Embedded()
	for _, test := range []struct {
		name        string
		loaded      loader.Options
		build, want uint64
	}{
		{"older", release(own.Revision-1, 7), 7, own.Build},
		{"same revision", release(own.Revision, 8), 8, own.Build},
		{"newer", release(own.Revision+1, 9), 9, 9},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := n.upgrade(t, test.loaded); err != nil {
				t.Fatal(err)
			}
			n.wantPrograms(t, test.build)
			b := n.AddPod(t, "b", nil)
			n.wantPrograms(t, test.want)
			del(t, b)
		})
	}
}

// `ebpfnetctl upgrade` is killed at each system call that changes something. Traffic continues, and the next ADD
// completes or reverts the upgrade.
func TestUpgradeKilled(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	load := n.startTraffic(t, a, web)
	own := loader.Embedded()
	for _, kill := range []struct {
		call string
		step int // 1 for every call
	}{{"mkdirat", workload(2, 2, 1)}, {"renameat", workload(5, 3, 1)}, {"unlinkat", workload(29, 12, 4)}, {"bpf", workload(151, 41, 29)}} {
		kills := 0
		for at := 1; ; at += kill.step {
			killed := false
			testenv.NoError(t, load.Lossless(t, func(int) error {
				if _, err := n.upgrade(t, release(own.Revision-1, 7)); err != nil {
					t.Fatal(err)
				}
				if killed = n.killUpgrade(t, kill.call, at); !killed {
					return nil
				}
				if err := load.More(1); err != nil {
					return err
				}
				del(t, n.AddPod(t, "b", nil))
				n.wantPrograms(t, own.Build)
				return nil
			}))
			if t.Failed() {
				t.Fatalf("after SIGKILL at %s %d", kill.call, at)
			}
			if !killed {
				break
			}
			kills++
		}
		if kills == 0 {
			t.Errorf("kills at %s: got none, want some", kill.call)
		}
		t.Logf("killed at %d calls of %s", kills, kill.call)
	}
}

// killUpgrade runs an upgrade that is killed at a system call, and reports whether it was.
func (n *network) killUpgrade(t *testing.T, call string, at int) bool {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), "strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace="+call,
		"-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", call, at), testenv.Build(t, "./cmd/ebpfnetctl"), "upgrade")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	testenv.Must(t, n.node().Do(cmd.Start))
	err := cmd.Wait()
	if err != nil && out.Len() > 0 {
		t.Fatalf("upgrade: %v: %s", err, &out)
	}
	return err != nil
}

// startTraffic starts TCP and UDP clients on all paths, at a pace that leaves time for the verifier.
func (n *network) startTraffic(t *testing.T, a, web *testenv.Pod) (all testenv.Askers) {
	t.Helper()
	for _, f := range testenv.Families {
		for _, protocol := range []string{"tcp", "udp"} {
			serve(t, web.Namespace, protocol, at(f.Pod(web), 80))
			serve(t, n.Outside, protocol, at(f.Outside, 80))
			for _, p := range n.allPaths(f, a, web) {
				for range 2 {
					client := connect(t, p.client, protocol, netip.AddrPort{}, p.dial)
					t.Cleanup(func() { client.Close() })
					all = append(all, client.KeepAsking(t, fmt.Sprintf("%s by %s, %s", p.name, protocol, f.Name), 4*time.Millisecond))
				}
			}
		}
	}
	return all
}

// drops counts the packets that the datapath has dropped.
func (n *network) drops(t *testing.T) (packets uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, counter := range must(maps.DropTotals(datapath)) {
			packets += counter.Packets
		}
	})
	return packets
}

// countResent returns a function that wants no TCP segment to have been lost since.
func (n *network) countResent(t *testing.T, pods ...*testenv.Pod) (none func() error) {
	t.Helper()
	namespaces := []*testenv.Namespace{n.node(), n.Outside}
	for _, pod := range pods {
		namespaces = append(namespaces, pod.Namespace)
	}
	before := resent(t, namespaces...)
	return func() error {
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Timeout/6) // the report of an unnecessary one may come late
		defer cancel()
		return testenv.Wait(ctx, "no lost TCP segments", func() error {
			if lost := resent(t, namespaces...) - before; lost > 0 {
				return fmt.Errorf("got %d", lost)
			}
			return nil
		})
	}
}

// resent counts the TCP segments that the namespaces have retransmitted, except those that had arrived: on a
// busy machine an acknowledgement may be late.
func resent(t *testing.T, namespaces ...*testenv.Namespace) (segments int) {
	t.Helper()
	for _, ns := range namespaces {
		segments += kernelCount(t, ns, "snmp", "Tcp", "RetransSegs") - kernelCount(t, ns, "netstat", "TcpExt", "TCPDSACKRecv")
	}
	return segments
}

// kernelCount reads a counter of a network namespace from a file that has a line of names and one of numbers for each group,
// or, without groups, a line for each counter.
func kernelCount(t *testing.T, ns *testenv.Namespace, file, group, name string) int {
	t.Helper()
	var text []byte
	err := ns.Do(func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/" + file)
		return err
	})
	testenv.Must(t, err)
	var names []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if group == "" {
			names, fields = fields[:1], fields[1:]
		} else if fields[0] != group+":" {
			continue
		} else if names == nil {
			names = fields
			continue
		}
		if i := slices.Index(names, name); i >= 0 {
			n, err := strconv.Atoi(fields[i])
			if err != nil {
				t.Fatalf("%s of %s: %v", name, file, err)
			}
			return n
		}
	}
	t.Fatalf("%s has no %s of %q", file, name, group)
	return 0
}

func programID(t *testing.T, program *ebpf.Program) ebpf.ProgramID {
	t.Helper()
	info, err := program.Info()
	testenv.Must(t, err)
	id, _ := info.ID()
	return id
}
