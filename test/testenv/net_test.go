package testenv

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
)

func TestNamespace(t *testing.T) {
	a, b := New(t, "twin"), New(t, "twin")
	if a.Name == b.Name || a.Path == b.Path {
		t.Fatalf("names %s and %s, paths %s and %s", a.Name, b.Name, a.Path, b.Path)
	}
	if err := a.Netlink().LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "here"}, PeerName: "there"}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Netlink().LinkByName("here"); err == nil {
		t.Error("both namespaces have the link")
	}
	out, err := a.Run(Context(t), "sh", "-c", "ip link show here && ls -d /sys/fs/bpf && stat -f -c %T /sys/fs/bpf")
	if err != nil || !strings.Contains(out, "bpf_fs") {
		t.Errorf("command in namespace: %v: %s", err, out)
	}
	if value, err := a.Sysctl("net/ipv4/ip_forward"); err != nil || value != "0" {
		t.Errorf("ip_forward is %q (%v)", value, err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(a.Path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("path after Close: %v", err)
	}
	if err := a.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestNamespaceDo(t *testing.T) {
	ns := New(t, "do")
	id := func() (link string) {
		link, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	own, inside := id(), ""
	if err := ns.Do(func() error { inside = id(); return nil }); err != nil {
		t.Fatal(err)
	}
	if inside == own {
		t.Error("Do did not enter the namespace")
	}
	want := errors.New("fn's error")
	if err := ns.Do(func() error { return want }); err != want {
		t.Errorf("Do returned %v", err)
	}
	func() {
		defer func() {
			if got := fmt.Sprint(recover()); !strings.Contains(got, "fn's panic") {
				t.Errorf("recovered %s", got)
			}
		}()
		ns.Do(func() error { panic("fn's panic") })
	}()
	t.Run("skipped on purpose", func(t *testing.T) {
		ns.Do(func() error { t.SkipNow(); return nil })
		t.Error("SkipNow in Do did not end the test")
	})
	for range 100 {
		if now := id(); now != own {
			t.Fatalf("a thread stayed in %s", now)
		}
	}
}

func TestTransferFails(t *testing.T) {
	top := NewTopology(t)
	nobody := netip.AddrPortFrom(OutsideAddr4, 1)
	err := Transfer(Context(t), top.Node, top.Outside, netip.AddrPortFrom(OutsideAddr4, 0), nobody, 1, 1)
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("transfer without a receiver: %v", err)
	}
	short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	err = Transfer(short, top.Node, top.Outside, netip.AddrPortFrom(OutsideAddr4, 0), netip.AddrPort{}, 1<<50, 1)
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("endless transfer: %v", err)
	}
}
