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
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// release is the embedded code as that of another version.
func release(revision uint32, build uint64) loader.Options {
	programs := loader.Embedded()
	programs.Revision, programs.Build = revision, build
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

// Programs are replaced again and again, forwards and backwards, while connections of all
// kinds exchange one packet after the other: none is lost, and none has to be sent again.
func TestUpgradeUnderTraffic(t *testing.T) {
	n := newNetwork(t)
	n.upgradeUnderTraffic(t, 200)
}

func TestUpgradeUnderTrafficByClsact(t *testing.T) {
	n := newNetwork(t)
	n.loadForClsact(t)
	n.upgradeUnderTraffic(t, 20)
}

func (n *network) upgradeUnderTraffic(t *testing.T, replacements int) {
	t.Helper()
	if testing.Short() {
		replacements = 10
	}
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	talk := n.startTalk(t, a, web)
	before, dropped := resent(t, n.node(), n.Outside, a.Namespace, web.Namespace), n.drops(t)

	for i := range replacements {
		done, err := n.upgrade(t, release(uint32(i%3), uint64(i+1)))
		if err != nil {
			t.Fatalf("replacement %d: %v", i+1, err)
		}
		if done.ToBuild != uint64(i+1) || done.FromBuild == done.ToBuild || done.Programs < 5 {
			t.Fatalf("replacement %d: %+v", i+1, done)
		}
		n.checkPrograms(t, done.ToBuild)
		talk.awaitRound(t)
	}
	talk.stop()
	if lost := resent(t, n.node(), n.Outside, a.Namespace, web.Namespace) - before; lost > 0 {
		t.Errorf("%d TCP segments were lost", lost)
	}
	if now := n.drops(t); now != dropped {
		t.Errorf("%d packets were dropped", now-dropped)
	}
}

// checkPrograms fails unless the programs of a build, and no others, are there, and on devices.
func (n *network) checkPrograms(t *testing.T, build uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		pins := must(filepath.Glob(filepath.Join(datapath.Dir(), "progs", "*", "*")))
		own := map[ebpf.ProgramID]bool{}
		for _, pin := range pins {
			if dir := filepath.Base(filepath.Dir(pin)); dir != fmt.Sprintf("%016x", build) {
				t.Errorf("program %s is left behind", pin)
			}
			program, err := ebpf.LoadPinnedProgram(pin, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer program.Close()
			info, err := program.Info()
			if err != nil {
				t.Fatal(err)
			}
			id, _ := info.ID()
			own[id] = true
		}
		if datapath.Config.Build != build || len(pins) < 5 {
			t.Errorf("%d programs of build %x are in use, want some of %x", len(pins), datapath.Config.Build, build)
		}
		for _, pin := range must(filepath.Glob(filepath.Join(datapath.Dir(), "links", "*"))) {
			attached, err := link.LoadPinnedLink(pin, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer attached.Close()
			info, err := attached.Info()
			if err != nil {
				t.Fatal(err)
			}
			if !own[info.Program] {
				t.Errorf("link %s has another program", pin)
			}
		}
		for _, device := range must(rtnl.Links(n.node().Netlink())) {
			for _, filter := range must(rtnl.Filters(n.node().Netlink(), device, netlink.HANDLE_MIN_INGRESS)) {
				if filter, ok := filter.(*netlink.BpfFilter); ok && !own[ebpf.ProgramID(filter.Id)] {
					t.Errorf("filter %s of %s has another program", filter.Name, device.Attrs().Name)
				}
			}
		}
	})
}

// An ADD brings the programs of its binary, unless newer ones are there.
func TestAddUpgrades(t *testing.T) {
	n := newNetwork(t)
	n.AddPod(t, "a", nil)
	own := loader.Embedded()
	for _, test := range []struct {
		name        string
		loaded      loader.Options
		build, want uint64
	}{
		{"older ones", release(own.Revision-1, 7), 7, own.Build},
		{"others of the same revision", release(own.Revision, 8), 8, own.Build},
		{"newer ones", release(own.Revision+1, 9), 9, 9},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := n.upgrade(t, test.loaded); err != nil {
				t.Fatal(err)
			}
			n.checkPrograms(t, test.build)
			b := n.AddPod(t, "b", nil)
			n.checkPrograms(t, test.want)
			del(t, b)
		})
	}
}

// `ebpfnetctl upgrade` is killed at each of its system calls that can change something: all goes
// on, and the next ADD finishes the work, or takes it back.
func TestUpgradeKilled(t *testing.T) {
	n := newNetwork(t)
	a, web := n.AddPod(t, "a", nil), n.AddPod(t, "web", mapBoth(8080, 80))
	talk := n.startTalk(t, a, web)
	own := loader.Embedded()
	for _, kill := range []struct {
		call string
		step int // of the many that load a program, one in some
	}{{"mkdirat", 1}, {"renameat", 1}, {"unlinkat", 4}, {"bpf", 29}} {
		kills := 0
		for at := 1; ; at += kill.step {
			if _, err := n.upgrade(t, release(own.Revision-1, 7)); err != nil {
				t.Fatal(err)
			}
			if !n.killUpgrade(t, kill.call, at) {
				break
			}
			kills++
			talk.awaitRound(t)
			del(t, n.AddPod(t, "b", nil))
			n.checkPrograms(t, own.Build)
			talk.awaitRound(t)
			if t.Failed() {
				t.Fatalf("after a kill at %s %d", kill.call, at)
			}
		}
		if kills == 0 {
			t.Errorf("no upgrade was killed at %s", kill.call)
		}
		t.Logf("killed at %d calls of %s", kills, kill.call)
	}
	talk.stop()
}

// killUpgrade says whether it was killed.
func (n *network) killUpgrade(t *testing.T, call string, at int) bool {
	t.Helper()
	cmd := exec.CommandContext(testenv.Context(t), "strace", "-f", "-qq", "-o", "/dev/null", "-e", "trace="+call,
		"-e", fmt.Sprintf("inject=%s:signal=KILL:when=%d", call, at), testenv.Build(t, "./cmd/ebpfnetctl"), "upgrade")
	var said strings.Builder
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := n.node().Do(cmd.Start); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	if err != nil && said.Len() > 0 {
		t.Fatalf("upgrade: %v: %s", err, &said)
	}
	return err != nil
}

// talk is many clients that ask their servers one question after the other.
type talk struct {
	cancel   context.CancelFunc
	clients  sync.WaitGroup
	answered []*atomic.Uint64 // by each client's server
}

// startTalk starts 16 clients of TCP and 16 of UDP on all ways through the node.
func (n *network) startTalk(t *testing.T, a, web *testenv.Pod) *talk {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	k := &talk{cancel: cancel}
	for _, f := range families {
		for _, protocol := range []string{"tcp", "udp"} {
			serve(t, web.Namespace, protocol, at(f.pod(web), 80))
			serve(t, n.Outside, protocol, at(f.outside, 80))
			for _, p := range n.paths(f, a, web, 80) {
				for range 2 {
					client, answered := connect(t, p.client, protocol, netip.AddrPort{}, p.dial), new(atomic.Uint64)
					k.answered = append(k.answered, answered)
					k.clients.Go(func() {
						defer client.Close()
						if err := keepAsking(ctx, client, answered); err != nil {
							t.Errorf("%s by %s, %s: %v", p.name, protocol, f.name, err)
						}
					})
				}
			}
		}
	}
	t.Cleanup(k.stop) // before the servers
	return k
}

// keepAsking goes on until ctx is done, at a pace that leaves time for the verifier. A question
// without an answer is a packet that was lost.
func keepAsking(ctx context.Context, client *testenv.Client, answered *atomic.Uint64) error {
	pace := time.NewTicker(4 * time.Millisecond)
	defer pace.Stop()
	for ctx.Err() == nil {
		<-pace.C
		patience, cancel := context.WithTimeout(context.WithoutCancel(ctx), testenv.Timeout)
		_, err := client.Ask(patience, "word")
		cancel()
		if err != nil {
			return fmt.Errorf("after %d answers: %w", answered.Load(), err)
		}
		answered.Add(1)
	}
	return nil
}

// awaitRound waits until every client has got another answer.
func (k *talk) awaitRound(t *testing.T) {
	t.Helper()
	before := make([]uint64, len(k.answered))
	for i, answered := range k.answered {
		before[i] = answered.Load()
	}
	testenv.Eventually(t, "another answer to every client", func() error {
		for i, answered := range k.answered {
			if answered.Load() == before[i] {
				return fmt.Errorf("client %d has got %d so far", i, before[i])
			}
		}
		return nil
	})
}

func (k *talk) stop() {
	k.cancel()
	k.clients.Wait()
}

// drops returns how many packets the datapath has dropped.
func (n *network) drops(t *testing.T) (packets uint64) {
	t.Helper()
	n.withDatapath(t, func(datapath *loader.Datapath) {
		for _, counter := range must(maps.DropTotals(datapath)) {
			packets += counter.Packets
		}
	})
	return packets
}

// resent returns how many TCP segments the namespaces have sent again, but for those that
// the receiver had got already: a busy machine may keep an acknowledgement for too long.
func resent(t *testing.T, namespaces ...*testenv.Namespace) (segments int) {
	t.Helper()
	for _, ns := range namespaces {
		segments += kernelCount(t, ns, "snmp", "Tcp", "RetransSegs") - kernelCount(t, ns, "netstat", "TcpExt", "TCPDSACKRecv")
	}
	return segments
}

// kernelCount reads one of the counters of a network namespace: a line of names, and one
// of numbers.
func kernelCount(t *testing.T, ns *testenv.Namespace, file, group, name string) int {
	t.Helper()
	var text []byte
	err := ns.Do(func() (err error) {
		text, err = os.ReadFile("/proc/thread-self/net/" + file)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if fields[0] != group+":" {
			continue
		}
		if names == nil {
			names = fields
			continue
		}
		n, err := strconv.Atoi(fields[slices.Index(names, name)])
		if err != nil {
			t.Fatalf("%s of %s: %v", name, file, err)
		}
		return n
	}
	t.Fatalf("%s has no %s", file, group)
	return 0
}
