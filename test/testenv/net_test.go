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

func TestTopology(t *testing.T) {
	top := NewTopology(t)
	top.AddSecondUplink(t)
	ctx := Context(t)
	for _, tc := range []struct {
		from *Namespace
		to   netip.Addr
	}{
		{top.Node, OutsideAddr4}, {top.Node, OutsideAddr6},
		{top.Outside, NodeAddr4}, {top.Outside, NodeAddr6},
		{top.Node, SecondOutsideAddr4}, {top.Node, SecondOutsideAddr6},
		{top.SecondOutside, SecondNodeAddr4}, {top.SecondOutside, SecondNodeAddr6},
	} {
		if err := Ping(ctx, tc.from, tc.to); err != nil {
			t.Error(err)
		}
	}
	// The node does not forward, and the outside host has no route.
	if err := Ping(ctx, top.Outside, SecondOutsideAddr4); err == nil {
		t.Error("the outside host reaches the second one")
	}
	for _, prefix := range []string{"10.1.0.0/16", "fd00:1::/64"} {
		prefix := netip.MustParsePrefix(prefix)
		if _, err := top.Outside.Netlink().RouteGet(prefix.Addr().Next().AsSlice()); err == nil {
			t.Errorf("the outside host has a route to %s", prefix)
		}
		if routes, err := top.Node.Netlink().RouteGet(prefix.Addr().Next().AsSlice()); err != nil || len(routes) != 1 {
			t.Errorf("the node's default route for %s: %v, %v", prefix, routes, err)
		}
		top.RouteTo(t, prefix)
		for _, ns := range []*Namespace{top.Outside, top.SecondOutside} {
			if _, err := ns.Netlink().RouteGet(prefix.Addr().Next().AsSlice()); err != nil {
				t.Errorf("route of %s to %s: %v", ns.Name, prefix, err)
			}
		}
	}
}

func TestSetOffloads(t *testing.T) {
	top := NewTopology(t)
	ctx := Context(t)
	for _, on := range []bool{false, true, false} {
		if err := top.Node.SetOffloads(UplinkName, on); err != nil {
			t.Fatal(err)
		}
		out, err := top.Node.Run(ctx, "ethtool", "-k", UplinkName)
		if err != nil {
			t.Fatal(err)
		}
		state := map[bool]string{false: "off", true: "on"}[on]
		for _, feature := range []string{"tx-checksumming", "scatter-gather", "generic-segmentation-offload",
			"tx-tcp-segmentation", "generic-receive-offload"} {
			if !strings.Contains(out, feature+": "+state) {
				t.Errorf("%s is not %s:\n%s", feature, state, out)
			}
		}
	}
	if err := Transfer(ctx, top.Node, top.Outside, netip.AddrPortFrom(OutsideAddr4, 0), netip.AddrPort{}, 1<<20, 1); err != nil {
		t.Error(err)
	}
}

func TestTraffic(t *testing.T) {
	top := NewTopology(t)
	ctx := Context(t)
	for _, addrs := range [][2]netip.Addr{{NodeAddr4, OutsideAddr4}, {NodeAddr6, OutsideAddr6}} {
		node, outside := addrs[0], addrs[1]
		listen := netip.AddrPortFrom(outside, 0)

		servers := map[string]*Server{"tcp": ServeTCP(t, top.Outside, listen), "udp": ServeUDP(t, top.Outside, listen)}
		for network, server := range servers {
			client, err := NewClient(ctx, top.Node, network, netip.AddrPortFrom(node, 4321), server.Addr)
			if err != nil {
				t.Fatal(err)
			}
			for _, payload := range []string{"", "a b", strings.Repeat("x", 40000)} {
				reply, err := client.Ask(ctx, payload)
				want := Reply{Peer: netip.AddrPortFrom(node, 4321), Server: top.Outside.Name, Payload: payload}
				if err != nil || reply != want {
					t.Errorf("%s client got %v, %v", network, reply, err)
				}
			}
			if client.Local() != netip.AddrPortFrom(node, 4321) {
				t.Errorf("client has address %s", client.Local())
			}
			server.Close()
			if _, err := client.Ask(ctx, "?"); err == nil || ctx.Err() != nil {
				t.Errorf("%s client of a closed server got %v", network, err)
			}
			client.Close()
			if _, err := Ask(ctx, top.Node, network, server.Addr, "?"); !errors.Is(err, syscall.ECONNREFUSED) {
				t.Errorf("%s client of no server got %v", network, err)
			}
		}

		web := ServeHTTP(t, top.Outside, listen)
		body, err := HTTPGet(ctx, top.Node, "http://"+web.Addr.String()+"/")
		if client, parseErr := netip.ParseAddrPort(body); err != nil || parseErr != nil || client.Addr() != node {
			t.Errorf("HTTP client got %q, %v", body, err)
		}
		if err := Transfer(ctx, top.Node, top.Outside, listen, netip.AddrPort{}, 10<<20, 42); err != nil {
			t.Error(err)
		}
	}
}

// TestUDPClientSurvivesLoss sends requests without a server until the deadline, and then starts
// one: the same socket must work.
func TestUDPClientSurvivesLoss(t *testing.T) {
	top := NewTopology(t)
	addr := netip.AddrPortFrom(OutsideAddr4, 5353)
	link, err := top.Outside.Netlink().LinkByName(UplinkName)
	if err != nil {
		t.Fatal(err)
	}
	if err := top.Outside.Netlink().LinkSetDown(link); err != nil {
		t.Fatal(err)
	}
	client, err := NewClient(Context(t), top.Node, "udp", netip.AddrPort{}, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := client.Ask(short, "lost"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("client got %v", err)
	}
	if err := top.Outside.Netlink().LinkSetUp(link); err != nil {
		t.Fatal(err)
	}
	ServeUDP(t, top.Outside, addr)
	Eventually(t, "a reply", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		reply, err := client.Ask(ctx, "found")
		if err == nil && reply.Peer.Port() != client.Local().Port() {
			t.Errorf("reply %v for %s", reply, client.Local())
		}
		return err
	})
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
