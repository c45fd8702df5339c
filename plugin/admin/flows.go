package admin

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/maps"
)

// Flow is a connection, with all that its map entries say of it.
type Flow struct {
	Protocol              string   `json:"protocol"`
	Source                Side     `json:"source"`                         // of its first packet
	Destination           Side     `json:"destination"`                    // as that packet had it
	TranslatedSource      Side     `json:"translatedSource,omitzero"`      // what becomes of Source
	TranslatedDestination Side     `json:"translatedDestination,omitzero"` // and of Destination
	TranslatedByHost      bool     `json:"translatedByHost,omitempty"`     // by the host's rules, which the datapath repeats
	Containers            []Named  `json:"containers"`                     // none: it is the host's own
	State                 string   `json:"state,omitempty"`                // one of FlowStates; empty: not known
	Offload               string   `json:"offload,omitempty"`              // as in maps.OffloadEntry; empty: none
	Path                  string   `json:"path,omitempty"`                 // "offload", or of the last packets "bypass" or "stack"; empty: not known
	Admitted              bool     `json:"admitted"`                       // the rules of a container have admitted it
	Age                   *float64 `json:"ageSeconds,omitempty"`           // since it was opened, modulo 19 hours
	Idle                  *float64 `json:"idleSeconds,omitempty"`          // since its last packet
	Replied               *bool    `json:"replied,omitempty"`              // both sides have sent
}

// Side is an address of a connection, with the port if it has one.
type Side struct{ netip.AddrPort }

// String returns "" for no side.
func (s Side) String() string {
	if !s.IsValid() {
		return ""
	}
	return maps.AddrPortText(s.AddrPort)
}

// MarshalText implements [encoding.TextMarshaler].
func (s Side) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// rstHeld is the state of a connection that the host has refused. The others are netfilter's.
const rstHeld = "RST_HELD"

// FlowStates lists the states that a Flow can have.
func FlowStates() []string { return append(slices.Clone(maps.FlowStateNames()), rstHeld) }

// FlowFilter selects connections. A zero field selects all.
type FlowFilter struct {
	Containers []*Attachment // one of them is a side
	Port       uint16        // of either side, before or after translation
	State      string        // one of FlowStates
	Peer       netip.Prefix  // has the side that is not the container, or not one of Containers
}

// Flows lists the connections that the filter selects, sorted by containers and addresses. The error describes
// entries that cannot be read.
func Flows(attachments []*Attachment, filter FlowFilter) ([]Flow, error) {
	datapath, err := loader.OpenLoaded()
	if err != nil {
		return nil, err
	}
	defer datapath.Close()

	flows, errFlows := maps.FlowEntries(datapath)
	offloads, errOffloads := maps.OffloadEntries(datapath)
	cache, errCache := maps.CacheEntries(datapath)
	l := flowList{attachments: attachmentsBy{ByOwner(attachments), ByAddress(attachments)}}
	l.merge(flows, offloads, cache)
	return l.selected(filter), errors.Join(errFlows, errOffloads, errCache)
}

type attachmentsBy struct {
	owner   map[string]*Attachment
	address map[netip.Addr]*Attachment
}

// connection is a Flow under construction.
type connection struct {
	Flow
	owner string
	sides []*Attachment
}

func (c *connection) matches(filter FlowFilter, by attachmentsBy) bool {
	isWanted := func(a *Attachment) bool {
		return a != nil && (filter.Containers == nil || slices.Contains(filter.Containers, a))
	}
	hasPort := func(s Side) bool { return s.Port() == filter.Port }
	return (filter.Containers == nil || slices.ContainsFunc(c.sides, isWanted)) &&
		(filter.State == "" || c.State == filter.State) &&
		(filter.Port == 0 || slices.ContainsFunc(c.ends(), hasPort)) &&
		(!filter.Peer.IsValid() || c.hasPeer(filter.Peer, by, isWanted))
}

// ends returns the sides before and after translation.
func (c *connection) ends() []Side {
	return []Side{c.Source, c.Destination, c.TranslatedSource, c.TranslatedDestination}
}

// hasPeer reports whether the prefix has the side that is not a wanted container; a service also has its own address. Where
// neither side is a container, it may be either.
func (c *connection) hasPeer(prefix netip.Prefix, by attachmentsBy, isWanted func(*Attachment) bool) bool {
	source, destination := c.Source.Addr(), c.final().destination.Addr()
	from, to := by.address[source], by.address[destination]
	neither := from == nil && to == nil
	isDestination := prefix.Contains(destination) || c.TranslatedByHost && prefix.Contains(c.Destination.Addr())
	return prefix.Contains(source) && (isWanted(to) || neither) || isDestination && (isWanted(from) || neither)
}

// selected completes the flows that the filter selects, and sorts them.
func (l *flowList) selected(filter FlowFilter) []Flow {
	flows := []Flow{}
	for _, c := range l.connections {
		found := []*Attachment{l.attachments.owner[c.owner]}
		for _, end := range c.ends() {
			found = append(found, l.attachments.address[end.Addr()])
		}
		c.Containers = []Named{}
		for i, a := range found {
			if a != nil && !slices.Contains(found[:i], a) {
				c.sides, c.Containers = append(c.sides, a), append(c.Containers, a.Named)
			}
		}
		if c.matches(filter, l.attachments) {
			flows = append(flows, c.Flow)
		}
	}
	slices.SortFunc(flows, compareFlows)
	return flows
}

func compareFlows(a, b Flow) int {
	container := func(f Flow) string {
		if len(f.Containers) == 0 {
			return ""
		}
		return f.Containers[0].Network + "/" + f.Containers[0].ContainerID
	}
	return cmp.Or(cmp.Compare(container(a), container(b)), cmp.Compare(a.Protocol, b.Protocol),
		a.Destination.Compare(b.Destination.AddrPort), a.Source.Compare(b.Source.AddrPort))
}
