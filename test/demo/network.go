package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/test/testenv"
)

const (
	podPort  = 80   // of every server
	hostPort = 8080 // of the node
)

var oldestKernel = testenv.Version{Major: 5, Minor: 10}

// prepare builds the machines.
func (d *demo) prepare(conflist string) error {
	release := testenv.KernelRelease()
	list, err := os.ReadFile(conflist)
	if err := errors.Join(err, checkKernel(release)); err != nil {
		return fmt.Errorf("cannot run here: %w", err)
	}
	plugin := testenv.Build(d, "./cmd/ebpfnet")
	d.topology = testenv.NewTopology(d)
	d.runtime = testenv.NewRuntime(d, d.topology.Node, list, filepath.Dir(plugin))
	d.serve(d.topology.Outside)
	for _, id := range []string{"a", "b", "c"} {
		pod := d.runtime.NewPod(d, id)
		d.pods = append(d.pods, pod)
		d.serve(pod.Namespace)
	}
	fmt.Fprintf(d.out, "ebpfnet on Linux %s: plugin %s, network %s\n", release, plugin, conflist)
	fmt.Fprintf(d.out, "  outside (%s, %s) --- eth0 node (%s, %s) --- pod-a, pod-b, pod-c\n",
		testenv.OutsideAddr4, testenv.OutsideAddr6, testenv.NodeAddr4, testenv.NodeAddr6)
	return nil
}

func checkKernel(release string) error {
	version, err := testenv.KernelVersion()
	if err != nil {
		return err
	}
	if version.Less(oldestKernel) {
		return fmt.Errorf("ebpfnet needs Linux %s or newer, this is %s", oldestKernel, release)
	}
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
		return errors.New("the demo needs IPv6, and this kernel runs without it (ipv6.disable=1 on its command line?)")
	}
	return nil
}

// serve starts servers that reply with their name and the client's address.
func (d *demo) serve(ns *testenv.Namespace) {
	addr := netip.AddrPortFrom(netip.IPv6Unspecified(), podPort)
	testenv.ServeTCP(d, ns, addr)
	testenv.ServeUDP(d, ns, addr)
}

// openDatapath opens what the first ADD has loaded.
func (d *demo) openDatapath() error {
	if d.datapath != nil {
		return nil
	}
	err := d.topology.Node.Do(func() (err error) {
		d.datapath, err = loader.OpenLoaded()
		return err
	})
	if err != nil {
		return err
	}
	d.Cleanup(d.datapath.Close)
	return nil
}

// addPods gives the last pod a host port.
func (d *demo) addPods() error {
	var mappings []map[string]any
	for _, protocol := range []string{"tcp", "udp"} {
		mappings = append(mappings, map[string]any{"hostPort": hostPort, "containerPort": podPort, "protocol": protocol})
	}
	d.pods[2].Conf.CapabilityArgs = map[string]any{"portMappings": mappings}

	for _, pod := range d.pods {
		took, err := timed(pod.Add)
		if err != nil {
			return fmt.Errorf("ADD %s: %w", pod.Name, err)
		}
		if err := d.openDatapath(); err != nil {
			return err
		}
		host := pod.Result.Interfaces[0].Name
		if err := d.checkPrograms(host); err != nil {
			return err
		}
		d.ok(pod.Name, "%s and %s behind %s, in %d ms", pod.Addr4(), pod.Addr6(), host, took.Milliseconds())
	}
	return nil
}

// checkPrograms looks for from_container and to_container on the host end of a pod's veth.
func (d *demo) checkPrograms(device string) error {
	link, err := d.topology.Node.Netlink().LinkByName(device)
	if err != nil {
		return fmt.Errorf("find %s on the node: %w", device, err)
	}
	return d.topology.Node.Do(func() error {
		attached, err := d.datapath.EndpointAttached(link.Attrs().Index)
		if err == nil && !attached {
			err = fmt.Errorf("%s has no programs", device)
		}
		return err
	})
}

func (d *demo) checkPods() error {
	start := time.Now()
	for _, pod := range d.pods {
		if _, err := timed(pod.Check); err != nil {
			return fmt.Errorf("CHECK %s: %w", pod.Name, err)
		}
	}
	d.ok("pod-a, pod-b, pod-c", "unchanged, in %d ms", time.Since(start).Milliseconds())
	return nil
}

// deletePods looks for leftovers before DEL as well, to show that it would find them.
func (d *demo) deletePods() error {
	before, err := testenv.Leftovers(d.topology.Node)
	if err != nil {
		return err
	}
	start := time.Now()
	for _, pod := range d.pods {
		if _, err := timed(pod.Del); err != nil {
			return fmt.Errorf("DEL %s: %w", pod.Name, err)
		}
	}
	d.ok("pod-a, pod-b, pod-c", "removed, in %d ms", time.Since(start).Milliseconds())
	after, err := testenv.Leftovers(d.topology.Node)
	if err != nil {
		return err
	}
	if len(before) == 0 || len(after) > 0 {
		return fmt.Errorf("after DEL, expected nothing of %d leftovers, found %v", len(before), after)
	}
	d.ok("leftovers", "none: the pods' %d devices, map entries, addresses and records are gone", len(before))
	return d.checkPortClosed()
}

func timed(call func(context.Context) error) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	start := time.Now()
	err := call(ctx)
	return time.Since(start), err
}
