package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/show"
)

// An unknown key can be a typing error, a key of a plugin that ebpfnet replaces, or a key of
// another tool: IPAM plugins read the whole configuration, and generators add keys of their own.

const keepBridge = `ebpfnet makes no bridge; leave it to the plugin "bridge", and put ebpfnet after it in the list`

// unsupported has the keys of the replaced plugins that ask for something that ebpfnet does not do,
// with what to write instead.
var unsupported = map[string]string{
	// bridge
	"vlan":                      keepBridge,
	"vlanTrunk":                 keepBridge,
	"disableContainerInterface": "ebpfnet sets the interface up; for a port that stays down use the plugin \"bridge\"",
	"portIsolation":             `write "ingressPolicy": "isolated"`,
	// macvlan, ipvlan, tuning
	"master":          `containers are behind the host, not on one of its devices; to choose the external one write "uplinks": ["eth0"]`,
	"linkInContainer": "containers are behind the host, not behind another container",
	"mac":             `write "args": {"cni": {"mac": "02:00:00:00:00:01"}}, or declare the capability "mac"`,
	// portmap
	"conditionsV4": `write "portSources" in args.cni`,
	"conditionsV6": `write "portSources" in args.cni`,
	// from device plugins
	"deviceID": "ebpfnet makes a veth pair and takes no device of the host; remove it",
}

const (
	noBridge = "there is no bridge"
	noRules  = "ebpfnet needs no firewall rules"
)

// ignored has the keys of the replaced plugins that ebpfnet does not need, with the reason.
var ignored = map[string]string{
	// bridge
	"bridge":              noBridge,
	"forceAddress":        noBridge,
	"promiscMode":         noBridge,
	"isGateway":           "the host is always the gateway",
	"isDefaultGateway":    "taken as default routes; ipam.routes is the place for them",
	"hairpinMode":         "containers always reach their own host ports",
	"preserveDefaultVlan": "there are no VLANs",
	"macspoofchk":         "antiSpoof checks more, and is on by default",
	"enabledad":           "each address is assigned once",
	"ipMasqBackend":       "eBPF masquerades",
	// macvlan, ipvlan
	"mode":       "each container has its own veth pair; ingressPolicy isolates them",
	"bcqueuelen": "there is no macvlan",
	// portmap, firewall
	"snat":                   noRules,
	"masqAll":                noRules,
	"markMasqBit":            noRules,
	"externalSetMarkChain":   noRules,
	"backend":                noRules,
	"iptablesAdminChainName": noRules,
	"firewalldZone":          noRules,
}

// lookalikes are keys of others (Calico, Spiderpool, Cilium) that resemble ours.
var lookalikes = []string{"log_level", "log_file", "log-level", "log-file"}

// ForeignKeys returns the keys of other tools that Parse found, fit for a log.
func (c *Call) ForeignKeys() []string { return c.foreign }

// IgnoredKeys returns the keys of replaced plugins that Parse ignored, each with the reason.
func (c *Call) IgnoredKeys() []string { return c.ignored }

// object is an object of the configuration that has keys of ours.
type object struct {
	path    string // "" for the configuration itself, or like "ipam."
	keys    map[string]json.RawMessage
	known   []string
	anyCase bool // our keys count in any case, as the reference plugins take them
}

// objectAt parses an object. The result has no keys if the text is not an object; other checks report that.
func objectAt(path string, text json.RawMessage, known []string, anyCase bool) object {
	o := object{path: path, known: known, anyCase: anyCase}
	_ = json.Unmarshal(text, &o.keys)
	return o
}

// checkKeys refuses misspelled and unsupported keys in all objects that have keys of ours, except
// runtimeConfig, which the runtime writes.
func (c *Call) checkKeys(conf *netConf) error {
	var args struct {
		CNI json.RawMessage `json:"cni"`
	}
	_ = json.Unmarshal(c.keys["args"], &args) // decoded before
	objects := []object{
		{keys: c.keys, known: keysOf(reflect.TypeOf(*conf))},
		objectAt("capabilities.", conf.Capabilities, keysOf(reflect.TypeOf(conf.RuntimeConfig)), false),
		objectAt("args.cni.", args.CNI, keysOf(reflect.TypeOf(conf.Args.CNI)), true),
	}
	if kind, err := ipamType(conf.IPAM); err == nil && kind == ownIPAM {
		objects = append(objects, ipamObjects(conf.IPAM)...)
	}
	return c.checkObjects(objects)
}

// ipamObjects returns the objects of an "ipam" section of our own.
func ipamObjects(section json.RawMessage) []object {
	var sets struct {
		Ranges [][]json.RawMessage `json:"ranges"`
	}
	_ = json.Unmarshal(section, &sets) // package ipam refuses another type
	objects := []object{objectAt("ipam.", section, ipam.Keys, true)}
	for i, set := range sets.Ranges {
		for j, text := range set {
			objects = append(objects, objectAt(fmt.Sprintf("ipam.ranges[%d][%d].", i, j), text, ipam.RangeKeys, true))
		}
	}
	return objects
}

func (c *Call) checkObjects(objects []object) error {
	for _, o := range objects {
		for _, key := range slices.Sorted(maps.Keys(o.keys)) {
			if err := c.checkKey(o, key); err != nil {
				return err
			}
		}
	}
	slices.Sort(c.foreign)
	return nil
}

// checkKey refuses a misspelled or unsupported key, and collects the ignored ones.
func (c *Call) checkKey(o object, key string) error {
	value, isTop := o.keys[key], o.path == ""
	instead, isUnsupported := unsupported[key]
	why, isIgnored := ignored[key]
	switch {
	case isTop && isUnsupported && !isZero(value):
		return cnierr.Unsupported(key, value, instead)
	case isTop && isUnsupported:
		return nil
	case isTop && isIgnored:
		c.ignored = append(c.ignored, key+": "+why)
		return nil
	case o.knows(key):
		return nil
	}
	if meant := nearest(key, o.known); meant != "" && !slices.Contains(lookalikes, key) {
		return cnierr.Unsupported(o.path+key, value, "no such key; did you mean "+meant+"?")
	}
	c.foreign = append(c.foreign, show.Short(o.path+key))
	return nil
}

func (o object) knows(key string) bool {
	return slices.ContainsFunc(o.known, func(known string) bool {
		return key == known || o.anyCase && strings.EqualFold(key, known)
	})
}

func keysOf(t reflect.Type) (keys []string) {
	for _, field := range reflect.VisibleFields(t) {
		if key := field.Tag.Get("json"); key != "" { // an embedded struct has none
			keys = append(keys, key)
		}
	}
	return keys
}

// isZero reports whether a value asks for nothing.
func isZero(text json.RawMessage) bool {
	var value any
	_ = json.Unmarshal(text, &value) // it is a part of what could be parsed
	switch v := value.(type) {
	case []any:
		return len(v) == 0
	case map[string]any:
		return len(v) == 0
	default:
		return v == nil || v == false || v == 0.0 || v == ""
	}
}

// maxTypos is the maximum distance at which a long key counts as one of ours, misspelled. Shorter keys have
// to be closer.
const maxTypos = 2

// nearest returns the known key that a key misspells, or "".
func nearest(key string, known []string) (meant string) {
	least := maxTypos + 1
	for _, candidate := range known {
		shorter := min(len(key), len(candidate))
		if max(len(key), len(candidate))-shorter > maxTypos {
			continue
		}
		d := distance(strings.ToLower(key), strings.ToLower(candidate))
		if d < least && (d == 0 || d <= shorter/3) {
			meant, least = candidate, d
		}
	}
	return meant
}

// distance returns how many bytes have to be inserted, removed, replaced or swapped with the next one
// to turn one text into the other (optimal string alignment).
func distance(a, b string) int {
	var beforeLast []int
	last := make([]int, len(b)+1)
	for j := range last {
		last[j] = j
	}
	for i := range len(a) {
		row := append(make([]int, 0, len(b)+1), i+1)
		for j := range len(b) {
			d := min(last[j+1]+1, row[j]+1, last[j]+one(a[i] != b[j]))
			if i > 0 && j > 0 && a[i] == b[j-1] && a[i-1] == b[j] {
				d = min(d, beforeLast[j-1]+1)
			}
			row = append(row, d)
		}
		beforeLast, last = last, row
	}
	return last[len(b)]
}

func one(is bool) int {
	if is {
		return 1
	}
	return 0
}
