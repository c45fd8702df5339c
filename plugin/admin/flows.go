package admin

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Flow is a map entry of a connection, in words for an operator.
type Flow struct {
	// Kind is snat (opened by a container, masqueraded), claim (the host's own), dnat (opened to a
	// container), egress (opened by a container with an ingress policy), rst-held, offload (bypasses the
	// stack) or cache (a direction in the forwarding cache).
	Kind        string   `json:"kind"`
	Protocol    string   `json:"protocol"`
	Source      string   `json:"source"`                // of its first packet; of an offload, one side
	Destination string   `json:"destination"`           // as that packet had it
	Translated  string   `json:"translated,omitempty"`  // what the source of snat, or the destination of dnat, becomes
	Containers  []Named  `json:"containers"`            // that it belongs to
	State       string   `json:"state"`                 // netfilter's names for those of flows
	Age         *float64 `json:"ageSeconds,omitempty"`  // since it was opened, modulo 19 hours
	Idle        *float64 `json:"idleSeconds,omitempty"` // since its last packet
	Replied     *bool    `json:"replied,omitempty"`     // both sides have sent
}

// Flows lists the entries of connections, sorted by containers and addresses. If only is not nil, it lists those
// of these attachments. The error describes entries that cannot be read.
func Flows(attachments []*Attachment, only []*Attachment) ([]Flow, error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return nil, err
	}
	defer datapath.Close()

	list := flowList{byOwner: ByOwner(attachments), byAddr: ByAddress(attachments), fromRemote: map[direction]string{}, only: only}
	err = errors.Join(list.addFlows(datapath), list.addOffloads(datapath), list.addCache(datapath))
	slices.SortFunc(list.flows, compareFlows)
	return list.flows, err
}

// flowKinds are in the order in which they are listed.
var flowKinds = []string{"snat", "dnat", "egress", "claim", "rst-held", "offload", "cache"}

func compareFlows(a, b Flow) int {
	container := func(f Flow) string {
		if len(f.Containers) == 0 {
			return ""
		}
		return f.Containers[0].Network + "/" + f.Containers[0].ContainerID
	}
	kind := func(f Flow) int { return slices.Index(flowKinds, f.Kind) }
	return cmp.Or(cmp.Compare(container(a), container(b)), cmp.Compare(kind(a), kind(b)), cmp.Compare(a.Protocol, b.Protocol),
		cmp.Compare(a.Destination, b.Destination), cmp.Compare(a.Source, b.Source))
}

// flowList is the list under construction.
type flowList struct {
	flows   []Flow
	byOwner map[string]*Attachment
	byAddr  map[netip.Addr]*Attachment
	// fromRemote has the owners of translated connections, by what their remotes send to the host's addresses.
	fromRemote map[direction]string
	only       []*Attachment // nil: all
}

type direction struct {
	protocol maps.Protocol
	from, to netip.AddrPort
}

// add adds a flow with the attachments of its owner and addresses.
func (l *flowList) add(f Flow, owner string, sides ...netip.AddrPort) {
	found := []*Attachment{l.byOwner[owner]}
	for _, side := range sides {
		found = append(found, l.byAddr[side.Addr()])
	}
	isWanted := func(a *Attachment) bool { return slices.Contains(l.only, a) }
	if l.only != nil && !slices.ContainsFunc(found, isWanted) {
		return
	}
	f.Containers = []Named{}
	for i, a := range found {
		if a != nil && !slices.Contains(found[:i], a) {
			f.Containers = append(f.Containers, a.Named)
		}
	}
	l.flows = append(l.flows, f)
}

func (l *flowList) addFlows(datapath *loader.Datapath) error {
	entries, err := maps.FlowEntries(datapath)
	for _, e := range entries {
		if e.Expired {
			continue // another takes its place when it needs one
		}
		f := Flow{Protocol: e.Protocol.String(), State: e.State.String(), Age: seconds(e.Age), Idle: seconds(e.Idle), Replied: &e.Replied}
		from, to, translated := e.Local, e.Remote, netip.AddrPort{}
		owner, atHost := e.Owner.String(), e.Local
		switch {
		case e.Kind == bpf.FlowSNAT && e.Owner == 0:
			f.Kind = "claim"
		case e.Kind == bpf.FlowSNAT:
			f.Kind, from, translated = "snat", e.NAT, e.Local
		case e.Kind == bpf.FlowDNAT:
			f.Kind, from, to, atHost = "dnat", e.Remote, e.NAT, e.NAT
			if e.NAT != e.Local {
				translated = e.Local
			}
		case e.Kind == bpf.FlowEgress:
			f.Kind = "egress"
		case e.Kind == bpf.FlowRSTHeld:
			f.Kind, from, to = "rst-held", e.Remote, e.Local
		}
		f.Source, f.Destination = maps.AddrPortText(from), maps.AddrPortText(to)
		if translated.IsValid() {
			f.Translated = maps.AddrPortText(translated)
		}
		l.fromRemote[direction{e.Protocol, e.Remote, atHost}] = owner
		l.add(f, owner, e.Local, e.Remote, e.NAT)
	}
	return err
}

func (l *flowList) addOffloads(datapath *loader.Datapath) error {
	entries, err := maps.OffloadEntries(datapath)
	for _, e := range entries {
		l.add(Flow{Kind: "offload", Protocol: e.Protocol.String(), State: e.State,
			Source: maps.AddrPortText(e.Sides[0]), Destination: maps.AddrPortText(e.Sides[1])}, "", e.Sides[0], e.Sides[1])
	}
	return err
}

// addCache leaves out entries that were not used for a while: nothing else shows that a connection has ended.
func (l *flowList) addCache(datapath *loader.Datapath) error {
	const longest = time.Minute

	entries, err := maps.CacheEntries(datapath)
	for _, e := range entries {
		if e.Idle > longest {
			continue
		}
		f := Flow{Kind: "cache", Protocol: e.Protocol.String(), State: e.State, Idle: seconds(e.Idle),
			Source: maps.AddrPortText(e.Src), Destination: maps.AddrPortText(e.Dst)}
		if e.NAT.IsValid() {
			f.Translated = maps.AddrPortText(e.NAT)
		}
		l.add(f, l.fromRemote[direction{e.Protocol, e.Src, e.Dst}], e.Src, e.Dst, e.NAT)
	}
	return err
}

// seconds are precise to a tick of the programs.
func seconds(d time.Duration) *float64 {
	s := d.Round(time.Second / 10).Seconds()
	return &s
}
