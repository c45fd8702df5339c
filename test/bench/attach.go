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

// atOnceLimit is how many calls run at the same time where there are many.
const atOnceLimit = 16

// attachment is a pod that is only attached and detached. It has a host port where others have.
type attachment struct{ add, del func() error }

// newAttachments makes the pods that are attached again and again: to make namespaces, and above
// all to remove them, would hold up what is measured.
func (s *setup) newAttachments(m *testenv.Machine) ([]attachment, error) {
	var all []attachment
	for i := range atOnceLimit {
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

// within runs a call that has testenv's patience.
func within(call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), testenv.Timeout)
	defer cancel()
	return call(ctx)
}

// bareAttachment makes and removes a veth, with the fewest requests that a pod could do with.
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

// calls is what ADD or DEL took in one round.
type calls struct {
	alone  []float64 // milliseconds
	atOnce float64   // per second
}

// measureCalls attaches and detaches one pod after the other, and then all at once.
func measureCalls(all []attachment, alone int, atOnceToo bool) (add, del calls, err error) {
	for i := range alone {
		a := all[i%len(all)]
		if err := errors.Join(add.timed(a.add), del.timed(a.del)); err != nil {
			return add, del, err
		}
	}
	if !atOnceToo {
		return add, del, nil
	}
	took, addErr := atOnce(all, func(a attachment) error { return a.add() })
	add.atOnce = float64(len(all)) / took.Seconds()
	took, delErr := atOnce(all, func(a attachment) error { return a.del() })
	del.atOnce = float64(len(all)) / took.Seconds()
	return add, del, errors.Join(addErr, delErr)
}

func (c *calls) timed(call func() error) error {
	begin := time.Now()
	err := call()
	c.alone = append(c.alone, float64(time.Since(begin))/float64(time.Millisecond))
	return err
}

// atOnce does something with all of them, atOnceLimit at a time, and returns how long that took.
// After an error it begins no further ones.
func atOnce[T any](all []T, do func(T) error) (time.Duration, error) {
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
	for range min(atOnceLimit, len(all)) {
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
