package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/refresh"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// TestUplinkComesUpLater has a device that is down and has no address when something looks for uplinks. Once it comes
// up, it works without another call.
func TestUplinkComesUpLater(t *testing.T) {
	for name, look := range map[string]func(*testing.T, *host){
		"first ADD": nil,
		"later ADD": func(t *testing.T, h *host) { h.pod(t, "c2", dual("1.1.0")).add(t) },
		"STATUS":    func(t *testing.T, h *host) { wantSuccess(t, h.status(t, dual("1.1.0")), "") },
		"repair": func(t *testing.T, h *host) {
			h.wantCtl(t, 0, []string{"repair"}, "programs of the new uplink "+testenv.SecondUplinkName)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			p := h.pod(t, "c1", dual("1.1.0"))
			if look == nil {
				h.AddSecondUplink(t)
				h.takeDown(t, testenv.SecondUplinkName)
				p.add(t)
			} else {
				p.add(t)
				h.AddSecondUplink(t)
				h.takeDown(t, testenv.SecondUplinkName)
				look(t, h)
			}
			h.wantUplinks(t, testenv.UplinkName, testenv.SecondUplinkName)
			h.ConfigureSecondUplink(t)
			testenv.Require(t, testenv.FIBSource) // else the next call notes the address
			wantPing(t, p.Namespace, testenv.SecondOutsideAddr4, testenv.SecondOutsideAddr6)
		})
	}
}

// takeDown sets a device of the node down and removes its addresses.
func (h *host) takeDown(t *testing.T, name string) {
	t.Helper()
	for _, args := range [][]string{{"link", "set", name, "down"}, {"addr", "flush", "dev", name}} {
		if _, err := h.Node.Run(testenv.Context(t), "ip", args...); err != nil {
			t.Fatal(err)
		}
	}
}

// wantUplinks compares the devices that have an uplink's entry and programs.
func (h *host) wantUplinks(t *testing.T, want ...string) {
	t.Helper()
	testenv.Must(t, h.hasUplinks(want...))
}

func (h *host) hasUplinks(want ...string) error {
	return h.Node.WithDatapath(func(datapath *loader.Datapath) error {
		uplinks, err := maps.Uplinks(datapath)
		var got []string
		for _, uplink := range uplinks {
			attached, errAttached := datapath.UplinkAttached(uplink.IfIndex)
			device, errDevice := h.Node.Netlink().LinkByIndex(uplink.IfIndex)
			if err = errors.Join(err, errAttached, errDevice); err == nil && attached {
				got = append(got, device.Attrs().Name)
			}
		}
		slices.Sort(got)
		if slices.Sort(want); err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("uplinks: got %q, want %q", got, want)
		}
		return err
	})
}

// TestUplinkBecomesPort moves an uplink's addresses to a bridge or bond above it. The next ADD leaves programs only
// there: otherwise what one has translated would meet the other.
func TestUplinkBecomesPort(t *testing.T) {
	for _, kind := range testenv.UplinkKinds[:2] {
		t.Run(kind.Name, func(t *testing.T) {
			testenv.Require(t, kind.Feature)
			h := newHost(t)
			h.pod(t, "c1", dual("1.1.0")).add(t)
			device := h.MoveUplink(t, kind)
			p := h.pod(t, "c2", dual("1.1.0"))
			p.add(t)
			h.wantUplinks(t, device)
			wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
		})
	}
}

// TestNamedUplinkComesLater names a device that does not exist. ADD succeeds and says so. The device gets its programs
// from whatever looks for uplinks next.
func TestNamedUplinkComesLater(t *testing.T) {
	for name, look := range map[string]func(*testing.T, *host, object){
		"ADD":    func(t *testing.T, h *host, conf object) { h.pod(t, "c2", conf).add(t) },
		"STATUS": func(t *testing.T, h *host, conf object) { wantSuccess(t, h.status(t, conf), "") },
		"repair": func(t *testing.T, h *host, _ object) { h.wantCtl(t, 0, []string{"repair"}, "new uplink wan0") },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			log := filepath.Join(t.TempDir(), "log")
			conf := with(with(dual("1.1.0"), "uplinks", list{testenv.UplinkName, "wan0"}), "logFile", log)
			h.pod(t, "c1", conf).add(t)
			if text, err := os.ReadFile(log); err != nil || !strings.Contains(string(text), `uplink=wan0`) {
				t.Errorf("log: got %q (%v), want a line with uplink=wan0", text, err)
			}
			h.wantUplinks(t, testenv.UplinkName)
			wan := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "wan0"}, PeerName: "peer"}
			testenv.Must(t, h.Node.Netlink().LinkAdd(wan))
			look(t, h, conf)
			h.wantUplinks(t, testenv.UplinkName, "wan0")
		})
	}
}

// TestUplinkReattached detaches a program from the uplink. CHECK must report it, and the next ADD or STATUS must
// attach it again.
func TestUplinkReattached(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	const rounds = 5 // the kernel detaches programs asynchronously
	h := newHost(t)
	p := h.pod(t, "c1", dual("1.0.0"))
	p.add(t)
	for round := range rounds {
		removePin("uplink-*-to_uplink")(t, p, nil)
		wantError(t, p.try(t, "CHECK"), cnierr.CodeDiffers, testenv.UplinkName, "programs")
		testenv.Eventually(t, "the program to be detached", func() error { return h.wantPrograms(ebpf.AttachTCXEgress, 0) })

		other := h.pod(t, "c2", dual("1.0.0"))
		if round%2 == 0 {
			other.add(t)
		} else {
			wantSuccess(t, h.status(t, dual("1.1.0")), "")
		}
		for _, place := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
			testenv.Eventually(t, "the uplink's programs", func() error { return h.wantPrograms(place, 1) })
		}
		wantSuccess(t, p.try(t, "CHECK"), "")
		wantPing(t, p.Namespace, testenv.OutsideAddr4, testenv.OutsideAddr6)
		other.del(t)
	}
}

// wantPrograms compares the number of programs on the node's uplink.
func (h *host) wantPrograms(place ebpf.AttachType, want int) error {
	device, err := h.Node.Netlink().LinkByName(testenv.UplinkName)
	if err != nil {
		return err
	}
	return h.Node.Do(func() error {
		attached, err := link.QueryPrograms(link.QueryOptions{Target: device.Attrs().Index, Attach: place})
		if err == nil && len(attached.Programs) != want {
			err = fmt.Errorf("programs on %s: got %d, want %d", place, len(attached.Programs), want)
		}
		return err
	})
}

// TestLoopbackReattached is the same for the program on lo, which serves the host's own access to host ports.
func TestLoopbackReattached(t *testing.T) {
	testenv.Require(t, testenv.TCX)
	h := newHost(t)
	p := h.pod(t, "c1", withPort(dual("1.1.0"), 8080))
	result := p.add(t)
	removePin("loopback-to_loopback")(t, p, nil)
	wantError(t, p.try(t, "CHECK"), cnierr.CodeDiffers, "loopback", "program")
	wantSuccess(t, h.status(t, dual("1.1.0")), "")
	wantSuccess(t, p.try(t, "CHECK"), "")
	wantFetch(t, h, p.Namespace, result)
	p.del(t)
}

// waitingContext tells when something begins to wait for it, as for a lock.
type waitingContext struct {
	context.Context
	waits chan struct{}
}

func (c waitingContext) Done() <-chan struct{} {
	select {
	case c.waits <- struct{}{}:
	default:
	}
	return c.Context.Done()
}

// TestUplinkBecomesContainerBridge has somebody find a bridge as an uplink, and wait for the datapath's lock while an ADD makes the
// bridge one of containers. That it must remain: an uplink would drop the containers' packets.
func TestUplinkBecomesContainerBridge(t *testing.T) {
	h := newHost(t)
	h.pod(t, "c1", dual("1.1.0")).add(t)
	h.ip(t, "link add br0 type bridge")
	h.ip(t, "addr add 10.99.0.1/24 dev br0")
	h.ip(t, "link set br0 up")
	bridge, err := h.Node.Netlink().LinkByName("br0")
	testenv.Must(t, err)
	index := bridge.Attrs().Index
	finder := waitingContext{testenv.Context(t), make(chan struct{}, 1)}
	refreshed := make(chan error, 1)
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		return maps.With(testenv.Context(t), datapath, func(store *maps.Store) error {
			go func() {
				refreshed <- h.Node.WithDatapath(func(datapath *loader.Datapath) error { return refresh.Host(finder, datapath, nil) })
			}()
			select {
			case <-finder.waits:
			case err := <-refreshed:
				return fmt.Errorf("no wait for the lock: %v", err)
			}
			return refresh.ExcludeBridge(datapath, store, index)
		})
	})
	testenv.Must(t, <-refreshed)
	h.wantUplinks(t, testenv.UplinkName)
	h.withDatapath(t, func(datapath *loader.Datapath) error {
		if got, _, err := maps.GetUplink(datapath, index); err != nil || !got.ContainerBridge {
			t.Errorf("entry of the bridge: got %v (%v), want one with containers", got, err)
		}
		return nil
	})
}
