package conformance

import (
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

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/drops"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

var dropFlood = flag.Int("dropflood", 20_000, "frames that the container of TestCtlDropsFlood sends")

// TestCtlDropsFlood has a container send packets that are dropped as fast as it can, and then the program run on as many
// more as an attacker with many CPUs would send. What is told is limited, what is left out is counted, both together
// are all, and the datapath's counters miss none. Another container's drops are told meanwhile.
func TestCtlDropsFlood(t *testing.T) {
	const limit, senders = 250, 2
	s := newScript(t)
	h := s.host
	evil, good := s.runtime.AddPod(t, "evil", nil), s.runtime.AddPod(t, "good", nil)
	before := h.dropTotals(t)["mac"]
	f := h.follow(t, "--limit", strconv.Itoa(limit))
	began := time.Now()
	var flood sync.WaitGroup
	for range senders {
		flood.Go(func() {
			frames := make([][]byte, 1000)
			for i := range frames {
				frames[i] = make([]byte, 60)
			}
			for range *dropFlood / senders / len(frames) {
				if err := evil.SendFrames(testenv.PodIfName, frames...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	hostile := senderOf(t, s, good, evil).Hostile()
	i := slices.IndexFunc(hostile, func(f testenv.Frame) bool { return f.Reason == bpf.ReasonAddress })
	if err := good.SendFrames(testenv.PodIfName, hostile[i].Bytes); err != nil {
		t.Fatal(err)
	}
	f.want(t, "of another container", func(d drops.Drop) bool { return d.ContainerID == "good" && d.Reason == "address" })
	flood.Wait()
	runs := 20 * *dropFlood
	h.withDatapath(t, func(datapath *loader.Datapath) error { return runFromContainer(datapath, evil, uint32(runs)) })
	took := time.Since(began)
	f.stop(t)

	dropped := h.dropTotals(t)["mac"] - before
	told := uint64(0)
	for _, d := range f.list() {
		if d.Reason == "mac" {
			told++
		}
	}
	seconds := uint64(took.Seconds()) + 2 // those begun
	most := seconds * limit * uint64(runtime.NumCPU())
	least := uint64(*dropFlood + runs) // the kernel begins runs anew that a signal interrupts
	if dropped < least || told+f.leftOut["mac"] != dropped || told == 0 || told > most {
		t.Errorf("got %d dropped, %d told and %d left out; want %d, at most %d of them told, and the rest left out", dropped, told, f.leftOut["mac"], least, most)
	}
	t.Logf("%d drops in %s (%.0f per second): told %d; the reader used %s of CPU", dropped, took, float64(dropped)/took.Seconds(), told,
		f.cmd.ProcessState.UserTime()+f.cmd.ProcessState.SystemTime())
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
