package conformance

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/drops"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var dropFlood = flag.Int("dropflood", 20_000, "frames that the container of TestCtlDropsFlood sends")

// TestCtlDropsFlood has a container send packets that are dropped as fast as it can, and then for seconds the program run
// on as many more as an attacker with many CPUs would send. The number of printed drops is limited. Printed and omitted
// drops together are all drops, and the datapath's counters miss none. Another container's drops are printed meanwhile.
func TestCtlDropsFlood(t *testing.T) {
	const limit, senders, seconds = 250, 2, 2
	s := newScript(t)
	h := s.host
	evil, good := s.runtime.AddPod(t, "evil", nil), s.runtime.AddPod(t, "good", nil)
	before := h.dropTotals(t)["mac"]
	f := h.follow(t, "--limit", strconv.Itoa(limit))
	began, used := time.Now(), cpuTime(t, f.cmd.Process.Pid)
	var flood sync.WaitGroup
	for range senders {
		flood.Go(func() {
			frames := make([][]byte, 1000)
			for i := range frames {
				frames[i] = make([]byte, 60)
			}
			for range *dropFlood / senders / len(frames) {
				testenv.NoError(t, evil.SendFrames(testenv.PodIfName, frames...))
			}
		})
	}
	hostile := good.Sender(t, evil).Hostile()
	i := slices.IndexFunc(hostile, func(f testenv.Frame) bool { return f.Reason == bpf.ReasonAddress })
	testenv.Must(t, good.SendFrames(testenv.PodIfName, hostile[i].Bytes))
	f.want(t, "of another container", func(d drops.Drop) bool { return d.ContainerID == "good" && d.Reason == "address" })
	flood.Wait()
	ctx := testenv.Context(t)
	least := uint64(*dropFlood) // the kernel begins runs anew that a signal interrupts
	h.withDatapath(t, func(datapath *loader.Datapath) (err error) {
		for runs := 5 * *dropFlood; errors.Join(err, ctx.Err()) == nil && f.floodedSeconds() < seconds; least += uint64(runs) {
			err = runFromContainer(datapath, evil, uint32(runs))
		}
		return err
	})
	took, used := time.Since(began), cpuTime(t, f.cmd.Process.Pid)-used
	h.awaitForged(t, before+least)
	f.stop(t)

	dropped := h.dropTotals(t)["mac"] - before
	printed := uint64(0)
	for _, d := range f.list() {
		if d.Reason == "mac" {
			printed++
		}
	}
	most := (uint64(took.Seconds()) + 2) * limit * uint64(runtime.NumCPU()) // of the seconds begun
	if dropped < least || printed+f.leftOut["mac"] != dropped || printed == 0 || printed > most {
		t.Errorf("got %d dropped, %d printed and %d left out; want %d, at most %d of them printed, and the rest left out", dropped, printed, f.leftOut["mac"], least, most)
	}
	t.Logf("%d drops in %s (%.0f per second): printed %d; the reader used %s, %.2f of a CPU", dropped, took,
		float64(dropped)/took.Seconds(), printed, used, used.Seconds()/took.Seconds())
}

// cpuTime returns what a process has used of all CPUs.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	const scheduler = 2 // CPUCLOCK_SCHED
	var used unix.Timespec
	testenv.Must(t, unix.ClockGettime(int32(^pid<<3|scheduler), &used))
	return time.Duration(used.Nano())
}

// runFromContainer runs the program that the container's frames meet, on a forged one.
func runFromContainer(datapath *loader.Datapath, pod *testenv.Pod, times uint32) error {
	pins, err := filepath.Glob(filepath.Join(datapath.Dir(), "progs", "*", bpf.ProgFromContainer))
	if err != nil || len(pins) != 1 {
		return fmt.Errorf("got pins %q (%v), want one", pins, err)
	}
	program, err := ebpf.LoadPinnedProgram(pins[0], nil)
	if err != nil {
		return err
	}
	defer program.Close()
	device, err := net.InterfaceByName(pod.Result.Interfaces[0].Name)
	if err != nil {
		return err
	}
	skb := struct { // the head of struct __sk_buff
		_       [10]uint32
		IfIndex uint32
	}{IfIndex: uint32(device.Index)}
	_, err = program.Run(&ebpf.RunOptions{Data: make([]byte, 60), Context: skb, Repeat: times})
	return err
}
