package bugreport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/cilium/ebpf"

	"github.com/ebpfnet/ebpfnet/bpf"
	"github.com/ebpfnet/ebpfnet/loader"
)

// mostEntries of a map are in the report.
const mostEntries = 10_000

// layout is what a map's keys and values are.
type layout struct{ key, value reflect.Type }

func of[K, V any]() layout { return layout{reflect.TypeFor[K](), reflect.TypeFor[V]()} }

// layouts are those of the maps in the report. The others repeat what is in these, or have packets.
var layouts = map[string]layout{
	bpf.MapCluster:       of[uint32, bpf.Cluster](),
	bpf.MapDevices:       of[uint32, bpf.Device](),
	bpf.MapDropTotals:    of[uint32, bpf.DropCount](),
	bpf.MapDrops:         of[bpf.DropKey, bpf.DropCount](),
	bpf.MapEndpoints:     of[bpf.Addr, bpf.Endpoint](),
	bpf.MapFlows:         of[bpf.FlowKey, bpf.Flow](),
	bpf.MapFragments:     of[bpf.FragmentKey, bpf.Fragment](),
	bpf.MapFwdCache:      of[uint32, bpf.FwdEntry](),
	bpf.MapGatewayRoutes: of[bpf.PrefixKey, bpf.Addr](),
	bpf.MapGeneration:    of[uint32, uint64](),
	bpf.MapHostPorts:     of[bpf.HostPortKey, bpf.HostPort](),
	bpf.MapMasqSources:   of[bpf.MasqSourcesKey, bpf.MasqSources](),
	bpf.MapNodes:         of[bpf.PrefixKey, bpf.Node](),
	bpf.MapNonMasqCIDRs:  of[bpf.PrefixKey, uint32](),
	bpf.MapOffloadTCP:    of[bpf.OffloadKey, bpf.Offload](),
	bpf.MapOffloadUDP:    of[bpf.OffloadKey, bpf.Offload](),
	bpf.MapPortSrcRanges: of[bpf.PrefixKey, uint32](),
	bpf.MapRouteRules:    of[uint32, uint32](),
	bpf.MapUplinks:       of[uint32, bpf.Uplink](),
	configPin:            of[uint32, bpf.HostConfig](),
}

const configPin = "config"

// mapDocument is a map in the report.
type mapDocument struct {
	Type       string     `json:"type"`
	KeySize    uint32     `json:"keySize"`
	ValueSize  uint32     `json:"valueSize"`
	MaxEntries uint32     `json:"maxEntries"`
	Entries    []mapEntry `json:"entries"`
}

type mapEntry struct {
	Key   any  `json:"key"`
	CPU   *int `json:"cpu,omitempty"` // whose value it is, in a map with one for each CPU
	Value any  `json:"value"`
}

// addMaps adds the maps of the calling thread's network namespace, whatever their version.
func addMaps(ctx context.Context, a *archive, _ Options) {
	name, err := loader.NetnsName()
	pins, errGlob := filepath.Glob(filepath.Join(loader.Root, name, "maps", "*"))
	if err = errors.Join(err, errGlob); err == nil && len(pins) == 0 {
		err = loader.ErrNotLoaded
	}
	if err != nil {
		a.add("maps", nil, err)
		return
	}
	for _, pin := range pins {
		known, ok := layouts[filepath.Base(pin)]
		if !ok || ctx.Err() != nil {
			continue
		}
		document, err := readMap(pin, known)
		var text []byte
		if document != nil {
			var errText error
			text, errText = document.text(a.room())
			err = errors.Join(err, errText)
		}
		a.add("maps/"+filepath.Base(pin)+".json", text, err)
	}
}

// text returns the document with as many entries as there is room for.
func (d *mapDocument) text(room int) ([]byte, error) {
	entries := len(d.Entries)
	for {
		text, err := marshal(d, "")
		switch {
		case err != nil:
			return nil, err
		case len(text) <= room && len(d.Entries) == entries:
			return text, nil
		case len(text) <= room:
			return text, fmt.Errorf("cut: the first %d of %d entries are here", len(d.Entries), entries)
		case len(d.Entries) == 0:
			return nil, fmt.Errorf("left out: there is room for %d bytes", room)
		}
		d.Entries = d.Entries[:len(d.Entries)/2]
	}
}

func readMap(pin string, known layout) (*mapDocument, error) {
	m, err := ebpf.LoadPinnedMap(pin, &ebpf.LoadPinOptions{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	defer m.Close()

	d := &mapDocument{m.Type().String(), m.KeySize(), m.ValueSize(), m.MaxEntries(), []mapEntry{}}
	if uint32(known.key.Size()) != m.KeySize() || uint32(known.value.Size()) != m.ValueSize() {
		return d, errors.New("the entries are left out: they have another layout than this version's")
	}
	if m.Type() == ebpf.PerCPUArray {
		known.value = reflect.SliceOf(known.value)
	}
	key, value := reflect.New(known.key), reflect.New(known.value)
	all := m.Iterate()
	for all.Next(key.Interface(), value.Interface()) {
		if d.add(key.Elem(), value.Elem()); len(d.Entries) > mostEntries {
			d.Entries = d.Entries[:mostEntries]
			return d, fmt.Errorf("cut: it has more than %d entries", mostEntries)
		}
	}
	return d, all.Err()
}

// add adds an entry, or one for each CPU that has written its own.
func (d *mapDocument) add(key, value reflect.Value) {
	if value.Kind() != reflect.Slice {
		d.Entries = append(d.Entries, mapEntry{Key: plain(key), Value: plain(value)})
		return
	}
	for cpu := range value.Len() {
		if of := value.Index(cpu); !of.IsZero() {
			d.Entries = append(d.Entries, mapEntry{plain(key), &cpu, plain(of)})
		}
	}
}

// plain converts a key or a value for JSON: addresses to text, tokens to hexadecimal digits.
func plain(v reflect.Value) any {
	switch value := v.Interface().(type) {
	case bpf.Addr:
		return netip.AddrFrom16(value.Bytes).Unmap().String()
	case [6]byte:
		return net.HardwareAddr(value[:]).String()
	}
	switch v.Kind() {
	case reflect.Struct:
		return plainStruct(v)
	case reflect.Array, reflect.Slice:
		list := make([]any, v.Len())
		for i := range list {
			list[i] = plain(v.Index(i))
		}
		return list
	default:
		return v.Interface()
	}
}

func plainStruct(v reflect.Value) any {
	members := map[string]any{}
	for i := range v.NumField() {
		field := v.Type().Field(i)
		name := strings.ToLower(field.Name[:1]) + field.Name[1:]
		switch {
		case field.Name == "_" || strings.HasPrefix(name, "pad"):
		case v.Type() == reflect.TypeFor[bpf.HostConfig]() && name == "secret":
			members[name] = leftOut
		case name == "owner" || name == "owners" || name == "container":
			members[name] = loader.Owner(v.Field(i).Uint()).String()
		case name == "build":
			members[name] = loader.BuildID(v.Field(i).Uint()).String()
		default:
			members[name] = plain(v.Field(i))
		}
	}
	return members
}
