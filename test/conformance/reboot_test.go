package conformance

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/record"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// reboot removes what a reboot removes: containers, pins and /run. The disk stays.
func (h *host) reboot(t *testing.T, id string, pods ...*pod) {
	t.Helper()
	for _, p := range pods {
		p.vanish(t)
	}
	for _, dir := range []string{loader.Root, record.DefaultDir} {
		testenv.Must(t, os.RemoveAll(dir))
	}
	changeBootID(t, id)
}

func changeBootID(t *testing.T, id string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "boot_id")
	testenv.Must(t, os.WriteFile(file, []byte(id+"\n"), 0o644))
	testenv.Mount(t, file, "/proc/sys/kernel/random/boot_id", "", unix.MS_BIND, "")
}

// TestReboot exhausts a range, reboots, and exhausts it again. A container that returns gets its addresses back,
// new ones get those of dead containers, and no running container loses its own.
func TestReboot(t *testing.T) {
	testenv.Require(t, testenv.FileMarks)
	h := newHost(t)
	conf := with(dual("1.1.0"), "ipam.ranges", list{
		list{object{"subnet": "10.88.0.0/24", "rangeStart": "10.88.0.2", "rangeEnd": "10.88.0.4"}},
		list{object{"subnet": "fd00:88::/64"}},
	})
	var old []*pod
	var addrs [][]netip.Addr
	for i := range 3 {
		p := h.pod(t, fmt.Sprintf("c%d", i), conf)
		old, addrs = append(old, p), append(addrs, addresses(p.add(t)))
	}
	wantError(t, h.status(t, conf), codeNotAvailable, "10.88.0.2-10.88.0.4")
	wantError(t, h.pod(t, "c3", conf).try(t, "ADD"), cnierr.CodeAddressesExhausted, "10.88.0.2-10.88.0.4")

	h.reboot(t, "the second boot", old...)
	wantSuccess(t, h.status(t, conf), "")
	back := h.pod(t, "c1", conf)
	if got := addresses(back.add(t)); !slices.Equal(got, addrs[1]) {
		t.Errorf("addresses after the reboot: got %v, want %v again", got, addrs[1])
	}
	running := []*pod{back}
	for _, id := range []string{"c4", "c5"} {
		p := h.pod(t, id, conf)
		p.add(t)
		running = append(running, p)
	}
	wantError(t, h.pod(t, "c6", conf).try(t, "ADD"), cnierr.CodeAddressesExhausted, "10.88.0.2-10.88.0.4")
	wantError(t, h.status(t, conf), codeNotAvailable, "10.88.0.2-10.88.0.4")
	for _, i := range []int{0, 2} { // the runtime deletes the others late
		wantSuccess(t, old[i].try(t, "DEL"), "")
	}
	for _, p := range running {
		wantSuccess(t, p.try(t, "CHECK"), "")
		wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
	}
}

// TestRestoredReservationOfRunningContainer changes the boot id, so that a reservation seems to be of an earlier boot,
// as after a restore of the files. A container that has its device keeps it.
func TestRestoredReservationOfRunningContainer(t *testing.T) {
	h := newHost(t)
	conf := with(single("1.1.0"), "ipam.ranges", list{list{object{"subnet": "10.88.0.0/30"}}})
	p := h.pod(t, "c1", conf)
	p.add(t)
	before := h.snapshot(t, p.Namespace)
	changeBootID(t, "the second boot")
	wantError(t, h.pod(t, "c2", conf).try(t, "ADD"), cnierr.CodeAddressesExhausted)
	wantError(t, h.status(t, conf), codeNotAvailable, "10.88.0.1-10.88.0.2")
	twin := *p
	twin.result = nil
	wantError(t, twin.try(t, "ADD"), cnierr.CodeAttachmentExists)
	h.wantUnchanged(t, before, p.Namespace)
}

// TestRebootAndGC calls GC after a reboot, without DEL for a container that does not return.
func TestRebootAndGC(t *testing.T) {
	h := newHost(t)
	before := h.snapshot(t)
	gone, back := h.pod(t, "c1", dual("1.1.0")), h.pod(t, "c2", dual("1.1.0"))
	gone.add(t)
	back.add(t)
	h.reboot(t, "the second boot", gone, back)
	again := h.pod(t, "c2", dual("1.1.0"))
	again.add(t)
	h.gc(t, dual("1.1.0"))
	wantSuccess(t, again.try(t, "CHECK"), "")
	again.del(t)
	h.waitUnchanged(t, before)
}

// TestDelOnFullDisk calls DEL after the disk has become full.
func TestDelOnFullDisk(t *testing.T) {
	h := newHost(t)
	for name, options := range map[string]string{"space": "size=64k", "inodes": "nr_inodes=32"} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			testenv.Mount(t, "none", dir, "tmpfs", 0, options)
			conf := with(dual("1.1.0"), "ipam.dataDir", dir)
			p, other := h.pod(t, "c1", conf), h.pod(t, "c2", conf)
			p.add(t)
			fillUp(t, dir)
			wantError(t, other.try(t, "ADD"), codeIO, dir, "no space left")
			wantSuccess(t, p.try(t, "CHECK"), "")
			p.del(t)
			left, err := filepath.Glob(filepath.Join(dir, "pods", "*:*"))
			if more, _ := filepath.Glob(filepath.Join(dir, "pods", "10.*")); err != nil || len(left)+len(more) > 0 {
				t.Errorf("left behind: %v, %v", left, more)
			}
		})
	}
}

// fillUp writes files until no more fits.
func fillUp(t *testing.T, dir string) {
	t.Helper()
	for i := range 1000 {
		path := filepath.Join(dir, fmt.Sprintf("filler%d", i))
		if os.WriteFile(path, make([]byte, 4096), 0o600) != nil {
			return
		}
	}
	t.Fatal("1000 files still fit")
}
