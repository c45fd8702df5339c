package policies

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"
)

// BenchmarkEvent updates after one pod of another node has come, and one has gone: 500 policies, 10,000 pods, 110 of this node.
func BenchmarkEvent(b *testing.B) {
	var pods []*Pod
	for i := range 10_000 {
		node := "other"
		if i%91 == 0 {
			node = "this"
		}
		pods = append(pods, &Pod{
			UID: fmt.Sprint(i), Namespace: fmt.Sprint("ns", i%100), Name: fmt.Sprint("p", i), Node: node, Created: time.Unix(int64(i), 0),
			Labels:    labels.Set{"app": fmt.Sprint("app", i/100%50), "hash": fmt.Sprint(i)},
			Addresses: []netip.Addr{netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), netip.AddrFrom16([16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)})},
		})
	}
	var texts []string
	for i := range 500 {
		texts = append(texts, fmt.Sprintf("{podSelector: {matchLabels: {app: app%d}}, ingress: [{from: [{podSelector: {matchLabels: {app: app%d}}}, {namespaceSelector: {matchLabels: {name: ns%d}}}], ports: [{port: 80}]}]}", i%50, (i+1)%50, i%100))
	}
	t := &testing.T{}
	cluster := clusterOf(t, pods, texts...)
	cluster.Namespaces = map[string]labels.Set{}
	for i := range 100 {
		cluster.Namespaces[fmt.Sprint("ns", i)] = labels.Set{"name": fmt.Sprint("ns", i)}
		for j := range 5 {
			cluster.Policies[i*5+j].Namespace = fmt.Sprint("ns", i)
		}
	}
	c := &Compiler{Node: "this"}
	start := time.Now()
	state := c.Compile(cluster)
	first := time.Since(start)
	have := Difference(state, &Present{}, true).Want
	b.ResetTimer()
	known := pods[slices.IndexFunc(pods, func(pod *Pod) bool { return pod.Node == "other" && state.Classes[pod.Addresses[0]] != 0 })]
	var last *Pod
	for i := range b.N {
		come := *known
		come.UID, come.Addresses = "new", []netip.Addr{netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)})}
		classes, isAll := c.Update([]Event{{last, &come}})
		if changes := ClassDifference(classes, have); !isAll || len(changes.Additions) != 1 || i > 0 && len(changes.Others) != 1 {
			b.Fatalf("%+v", changes)
		}
		last = &come
	}
	b.ReportMetric(float64(first.Milliseconds()), "ms/first")
	b.ReportMetric(float64(len(c.classes.byContent)), "classes")
}

// TestUpdate compares updates with compilations of all, for random events.
func TestUpdate(t *testing.T) {
	const toA = "{podSelector: {matchLabels: {app: web}}, ingress: [{from: [{namespaceSelector: {matchLabels: {team: two}}}, {podSelector: {matchLabels: {app: a}}}]}]}"
	c, pods, updates := &Compiler{Node: "this"}, peersOf(), 0
	have := Difference(c.Compile(clusterOf(t, pods, toA)), &Present{}, true).Want
	for range 2000 {
		var events []Event
		for range 1 + rand.IntN(3) {
			i := 1 + rand.IntN(len(pods)-1)
			changed := *pods[i]
			changed.Node, changed.IsDone = "other", rand.IntN(4) == 0
			changed.Labels = labels.Set{"app": string('a' + rune(rand.IntN(3)))}
			changed.Addresses = peersOf()[1+rand.IntN(len(pods)-1)].Addresses[rand.IntN(2):]
			events = append(events, Event{pods[i], &changed})
			pods[i] = &changed
		}
		cluster := clusterOf(t, pods, toA)
		want := (&Compiler{Node: "this"}).Compile(cluster).Classes
		classes, isAll := c.Update(events)
		if isAll {
			updates++
			ClassDifference(classes, have)
		} else {
			have = Difference(c.Compile(cluster), have, true).Want
		}
		if !maps.Equal(have.Classes, want) {
			t.Fatalf("after %+v: got %v, want %v", events, have.Classes, want)
		}
	}
	if updates < 100 {
		t.Errorf("got %d updates without a compilation, want more", updates)
	}
}
