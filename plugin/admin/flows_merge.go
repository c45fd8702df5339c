package admin

import (
	"cmp"
	"net/netip"
	"slices"
	"time"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/maps"
)

// flowList has the connections, each of which may have several entries: a translation or two, a policy's admission,
// an offload, and decisions in the forwarding caches. Their tuples say which belong together.
type flowList struct {
	attachments attachmentsBy
	connections []*connection
	byTuple     map[tuple]*connection // normal, before and after translation
}

type tuple struct {
	protocol            string
	source, destination netip.AddrPort
}

// normal returns the same for both directions.
func (t tuple) normal() tuple {
	if t.source.Compare(t.destination) < 0 {
		t.source, t.destination = t.destination, t.source
	}
	return t
}

func (c *connection) original() tuple {
	return tuple{c.Protocol, c.Source.AddrPort, c.Destination.AddrPort}
}

// final is the tuple after translation.
func (c *connection) final() tuple {
	t := c.original()
	if c.TranslatedSource.IsValid() {
		t.source = c.TranslatedSource.AddrPort
	}
	if c.TranslatedDestination.IsValid() {
		t.destination = c.TranslatedDestination.AddrPort
	}
	return t
}

// index has later entries with the tuples join the connection. Of several with one tuple, the first keeps it.
func (l *flowList) index(c *connection) {
	for _, t := range []tuple{c.original().normal(), c.final().normal()} {
		if l.byTuple[t] == nil {
			l.byTuple[t] = c
		}
	}
}

// find returns the connection that has one of the tuples, or nil.
func (l *flowList) find(tuples ...tuple) *connection {
	for _, t := range tuples {
		if c := l.byTuple[t.normal()]; c != nil {
			return c
		}
	}
	return nil
}

func (l *flowList) add(c *connection) *connection {
	l.connections = append(l.connections, c)
	l.index(c)
	return c
}

func (l *flowList) merge(flows []maps.FlowEntry, offloads []maps.OffloadEntry, cache []maps.CacheEntry) {
	l.byTuple = map[tuple]*connection{}
	offloads = slices.DeleteFunc(offloads, func(e maps.OffloadEntry) bool { return e.Expired })
	l.addTranslatedByHost(flows, offloads)
	slices.SortStableFunc(flows, mergeOrder)
	for _, e := range flows {
		if !e.Expired && e.Kind != bpf.FlowCTNAT { // else another takes its place when it needs one
			l.addFlow(e)
		}
	}
	for _, e := range offloads {
		l.addOffload(e)
	}
	for _, e := range cache {
		l.addDecision(e)
	}
}

// addTranslatedByHost adds the connections that the host's rules translate: pairs of a flow, which has the tuple before
// translation, and an offload, which has the one after it. A flow without an offload is left out, because nothing says when its
// connection ends. Both name the same entry of conntrack. But conntrack uses an entry's memory again, so that flows and offloads
// of former connections may name it, too. So pairs with an unchanged source are found first, then those with an unchanged source
// port, which conntrack keeps if it can, and then the latest.
func (l *flowList) addTranslatedByHost(flows []maps.FlowEntry, offloads []maps.OffloadEntry) {
	byCT := map[uint64][]maps.OffloadEntry{}
	for _, e := range slices.SortedFunc(slices.Values(offloads), func(a, b maps.OffloadEntry) int { return cmp.Compare(a.Seen, b.Seen) }) {
		byCT[e.CT] = append(byCT[e.CT], e)
	}
	before := slices.DeleteFunc(slices.Clone(flows), func(e maps.FlowEntry) bool { return e.Kind != bpf.FlowCTNAT || e.Expired })
	slices.SortStableFunc(before, func(a, b maps.FlowEntry) int { return cmp.Compare(a.Age, b.Age) })
	for _, canBecome := range []func(source, translated netip.AddrPort) bool{
		func(source, translated netip.AddrPort) bool { return source == translated },
		func(source, translated netip.AddrPort) bool { return source.Port() == translated.Port() },
		func(_, _ netip.AddrPort) bool { return true },
	} {
		before = slices.DeleteFunc(before, func(e maps.FlowEntry) (isAdded bool) {
			for i, after := range byCT[e.CT] {
				server := slices.Index(after.Sides[:], e.NAT)
				if server < 0 || after.Protocol != e.Protocol || !canBecome(e.Local, after.Sides[1-server]) {
					continue
				}
				c := connectionOf(e)
				c.TranslatedSource, c.State = changed(after.Sides[1-server], e.Local), cmp.Or(stateOfOffload(after), c.State)
				l.add(c)
				byCT[e.CT] = slices.Delete(byCT[e.CT], i, i+1)
				return true
			}
			return false
		})
	}
}

// mergeOrder has those that translate come first, of several with one tuple the latest, and the host's own last. Of two
// sides that a policy has admitted, the first has opened the connection.
func mergeOrder(a, b maps.FlowEntry) int {
	isHost := func(e maps.FlowEntry) int {
		if e.Owner == 0 {
			return 1
		}
		return 0
	}
	age := cmp.Compare(a.Age, b.Age)
	if a.Kind == bpf.FlowPolicy {
		age = -age
	}
	return cmp.Or(cmp.Compare(isHost(a), isHost(b)), cmp.Compare(a.Kind, b.Kind), age)
}

// addFlow adds a flow, or has it join the connection to which it belongs.
func (l *flowList) addFlow(e maps.FlowEntry) {
	c := connectionOf(e)
	switch e.Kind {
	case bpf.FlowDNAT:
		// A client on this host has two flows: one translates its address, one the host port. So has a connection
		// of the host that was moved to another port.
		if known := l.find(c.final()); known != nil && known.final() == c.final() {
			known.Destination, known.TranslatedDestination = c.Destination, c.TranslatedDestination
			known.Idle = earliest(known.Idle, e.Idle)
			if e.Owner != 0 {
				known.Path = "bypass" // always
			}
			l.index(known)
			return
		}
	case bpf.FlowPolicy:
		if known := l.find(c.original()); known != nil {
			known.Admitted = true
			known.Idle = earliest(known.Idle, e.Idle)
			return
		}
	case bpf.FlowRSTHeld: // no connection has it
		l.connections = append(l.connections, c)
		return
	}
	l.add(c)
}

// connectionOf returns a connection from one of its flows.
func connectionOf(e maps.FlowEntry) *connection {
	c := &connection{owner: e.Owner.String(), Flow: Flow{
		Protocol: e.Protocol.String(), State: e.State.String(), Age: seconds(e.Age), Idle: seconds(e.Idle), Replied: &e.Replied,
		Source: Side{e.Local}, Destination: Side{e.Remote},
	}}
	switch {
	case e.Kind == bpf.FlowSNAT:
		c.Source, c.TranslatedSource = Side{e.NAT}, changed(e.Local, e.NAT)
	case e.Kind == bpf.FlowDNAT && e.Owner == 0:
		c.TranslatedSource = changed(e.NAT, e.Local)
	case e.Kind == bpf.FlowDNAT:
		c.Source, c.Destination = Side{netip.AddrPortFrom(e.Remote.Addr(), e.RemotePort)}, Side{e.NAT}
		c.TranslatedSource, c.TranslatedDestination = changed(e.Remote, c.Source.AddrPort), changed(e.Local, e.NAT)
	case e.Kind == bpf.FlowPolicy:
		c.Admitted = true
		if e.ByRemote {
			c.Source, c.Destination = c.Destination, c.Source
		}
	case e.Kind == bpf.FlowCTNAT:
		c.TranslatedDestination, c.TranslatedByHost = changed(e.NAT, e.Remote), true
	case e.Kind == bpf.FlowRSTHeld:
		c.Source, c.Destination, c.State = Side{e.Remote}, Side{e.Local}, rstHeld
	}
	return c
}

func changed(after, before netip.AddrPort) (translated Side) {
	if after != before {
		translated = Side{after}
	}
	return translated
}

// openedBy returns the tuple of a connection of which no entry says who has opened it: the side with the higher port.
func openedBy(protocol maps.Protocol, a, b netip.AddrPort) tuple {
	if a.Port() < b.Port() {
		a, b = b, a
	}
	return tuple{protocol.String(), a, b}
}

// addUnknown adds a connection that no flow describes.
func (l *flowList) addUnknown(t tuple) *connection {
	return l.add(&connection{Flow: Flow{Protocol: t.protocol, Source: Side{t.source}, Destination: Side{t.destination}}})
}

func (l *flowList) addOffload(e maps.OffloadEntry) {
	t := openedBy(e.Protocol, e.Sides[1], e.Sides[0])
	c := l.find(t)
	if c == nil {
		c = l.addUnknown(t)
		c.State = stateOfOffload(e)
	}
	c.Offload = e.State
	if e.State != "one way" {
		c.Path = "offload"
	}
	c.Idle = earliest(c.Idle, e.Seen)
}

// stateOfOffload returns the state of a connection of which only the offload is known.
func stateOfOffload(e maps.OffloadEntry) string {
	switch {
	case e.State == "closing":
		return maps.FlowState(bpf.FlowFINWait).String()
	case e.State == "closed":
		return maps.FlowState(bpf.FlowTimeWait).String()
	case e.FlowState == maps.FlowState(bpf.FlowSYNSent): // it is older than its offload
		return ""
	}
	return e.FlowState.String()
}

// addDecision adds a decision of the forwarding cache. Without another entry, only a recent one shows a connection:
// nothing tells its end. One that translates has a flow while the connection exists.
func (l *flowList) addDecision(e maps.CacheEntry) {
	const recent = time.Minute

	after := tuple{e.Protocol.String(), e.Src, e.Dst}
	before := after
	switch {
	case e.NAT.IsValid() && e.NATSrc:
		after.source = e.NAT
	case e.NAT.IsValid():
		after.destination = e.NAT
	}
	c := l.find(before, after)
	if c == nil {
		if e.NAT.IsValid() || e.Idle > recent {
			return
		}
		c = l.addUnknown(openedBy(e.Protocol, e.Src, e.Dst))
	}
	if e.State == "stack" && c.Path != "offload" || e.State == "bypass" && c.Path == "" {
		c.Path = e.State
	}
	c.Idle = earliest(c.Idle, e.Idle)
}

// earliest returns the shorter of two times in seconds, of which the first may not be known.
func earliest(known *float64, other time.Duration) *float64 {
	if s := seconds(other); known == nil || *s < *known {
		return s
	}
	return known
}

// seconds are precise to a tick of the programs.
func seconds(d time.Duration) *float64 {
	s := d.Round(time.Second / 10).Seconds()
	return &s
}
