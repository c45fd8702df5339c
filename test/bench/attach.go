package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/ebpfnet/ebpfnet/test/testenv"
)

// concurrency is the number of concurrent calls.
const concurrency = 16

// attachment adds and deletes a pod. The pod has a host port unless its variant has no NAT.
type attachment struct{ add, del func() error }

// newAttachments makes pods once, to be attached many times: creating and above all removing their
// namespaces would disturb the measurement.
func (s *setup) newAttachments(m *testenv.Machine) ([]attachment, error) {
	var all []attachment
	for i := range concurrency {
		if s.runtime == nil {
			a, err := bareAttachment(m, s.topology.Node, i)
			if err != nil {
				return nil, err
			}
			all = append(all, a)
			continue
		}
		pod := s.runtime.NewPod(m, fmt.Sprintf("attached-%d", i))
		if !s.routed {
			pod.Conf.CapabilityArgs = mapPorts(attachPorts+i, 1)
		}
		all = append(all, attachment{
			add: func() error { return within(pod.Add) },
			del: func() error { return within(pod.Del) },
		})
	}
	return all, nil
}

// within runs a call with testenv's timeout.
func within(call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	return call(ctx)
}

// bareAttachment adds and removes a veth with the fewest requests that give a pod a network.
func bareAttachment(m *testenv.Machine, node *testenv.Namespace, i int) (attachment, error) {
	pod := testenv.New(m, "attached")
	fd, err := netns.GetFromPath(pod.Path)
	if err != nil {
		return attachment{}, err
	}
	m.Cleanup(func() { fd.Close() })
	host := fmt.Sprintf("bare%d", i)
	add := func() error {
		veth := netlink.NewVeth(netlink.LinkAttrs{Name: host, TxQLen: -1, Flags: 1}) // net.FlagUp
		veth.PeerName, veth.PeerNamespace = testenv.PodIfName, netlink.NsFd(int(fd))
		if err := node.Netlink().LinkAdd(veth); err != nil {
			return err
		}
		inside, err := pod.Netlink().LinkByName(testenv.PodIfName)
		if err != nil {
			return err
		}
		for _, address := range []string{fmt.Sprintf("10.99.0.%d/16", i+1), fmt.Sprintf("fd00:99::%d/64", i+1)} {
			addr, err := netlink.ParseAddr(address)
			if err != nil {
				return err
			}
			if err := pod.Netlink().AddrAdd(inside, addr); err != nil {
				return err
			}
		}
		return pod.Netlink().LinkSetUp(inside)
	}
	del := func() error {
		outside, err := node.Netlink().LinkByName(host)
		if err != nil {
			return err
		}
		return node.Netlink().LinkDel(outside)
	}
	return attachment{add, del}, nil
}

// calls has the times of ADD or DEL in one round.
type calls struct {
	sequential []float64 // milliseconds
	concurrent float64   // per second
}

// measureCalls attaches and detaches one pod after the other, and then all concurrently.
func measureCalls(all []attachment, sequential int, alsoConcurrent bool) (add, del calls, err error) {
	for i := range sequential {
		a := all[i%len(all)]
		if err := errors.Join(add.timed(a.add), del.timed(a.del)); err != nil {
			return add, del, err
		}
	}
	if !alsoConcurrent {
		return add, del, nil
	}
	took, errAdd := concurrently(all, func(a attachment) error { return a.add() })
	add.concurrent = float64(len(all)) / took.Seconds()
	took, errDel := concurrently(all, func(a attachment) error { return a.del() })
	del.concurrent = float64(len(all)) / took.Seconds()
	return add, del, errors.Join(errAdd, errDel)
}

func (c *calls) timed(call func() error) error {
	begin := time.Now()
	err := call()
	c.sequential = append(c.sequential, float64(time.Since(begin))/float64(time.Millisecond))
	return err
}

// concurrently runs do for every element, concurrency at a time, and returns how long that took.
// After an error it starts no further ones.
func concurrently[T any](all []T, do func(T) error) (time.Duration, error) {
	var (
		group sync.WaitGroup
		mu    sync.Mutex
		next  int
		first error
	)
	take := func() (thing T, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		if first != nil || next == len(all) {
			return thing, false
		}
		next++
		return all[next-1], true
	}
	begin := time.Now()
	for range min(concurrency, len(all)) {
		group.Go(func() {
			for thing, ok := take(); ok; thing, ok = take() {
				if err := do(thing); err != nil {
					mu.Lock()
					first = err
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	return time.Since(begin), first
}
