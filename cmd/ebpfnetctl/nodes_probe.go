package main

import (
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/echo"
	"github.com/ebpfnet/ebpfnet/cmd/ebpfnetctl/output"
)

var probeColumns = []output.Column[clusterNode]{
	{Head: "RTT", Text: clusterNode.roundTrip, Right: true},
	{Head: "PATH-MTU", Text: clusterNode.pathMTU, Right: true, Color: redIf(clusterNode.isNarrow)},
}

func redIf(is func(clusterNode) bool) func(clusterNode) output.Color {
	return func(n clusterNode) output.Color {
		if is(n) {
			return output.Red
		}
		return output.Plain
	}
}

// probeNodes notes of each node how it answers. It returns errFound if one does not as it should.
func probeNodes(nodes []clusterNode, wait time.Duration) error {
	const atOnce = 64

	slots := make(chan struct{}, atOnce)
	var all sync.WaitGroup
	for i := range nodes {
		if nodes[i].Mode != modeSkipped {
			all.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				nodes[i].probe(wait)
			})
		}
	}
	all.Wait()
	if slices.ContainsFunc(nodes, func(n clusterNode) bool { return n.Fault != "" || n.isNarrow() }) {
		return errFound
	}
	return nil
}

func (n *clusterNode) probe(wait time.Duration) {
	trip, err := echo.RoundTrip(n.entry.Answerer(), wait)
	if err != nil {
		n.Fault = fmt.Sprintf("%s: %v", n.entry.Answerer(), err)
		return
	}
	n.RoundTrip = trip.Seconds()
	if n.PathMTU, err = echo.PathMTU(n.entry.Remote, n.entry.OuterMTU(), wait); err != nil {
		n.Fault = fmt.Sprintf("%s: %v", n.entry.Remote, err)
	}
}

// isNarrow is true if a link on the way takes less than the longest packets.
func (n clusterNode) isNarrow() bool { return n.PathMTU != 0 && n.PathMTU < n.entry.OuterMTU() }

func (n clusterNode) roundTrip() string {
	if n.RoundTrip == 0 {
		return ""
	}
	return fmt.Sprintf("%.2fms", n.RoundTrip*1000)
}

func (n clusterNode) pathMTU() string {
	if n.PathMTU == 0 {
		return ""
	}
	return strconv.Itoa(n.PathMTU)
}
