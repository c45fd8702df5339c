package metrics

import (
	"encoding/json"
	"os"
	"slices"

	"github.com/containernetworking/cni/libcni"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/plugin/config"
)

// pool counts the addresses of a network and the reserved ones.
type pool struct {
	network string
	ranges  []ipam.Usage
}

// conf has those keys of a network configuration, or of one of its plugins, that matter here.
type conf struct {
	Name    string          `json:"name"`
	Type    string          `json:"type"`
	IPAM    json.RawMessage `json:"ipam"`
	Plugins []conf          `json:"plugins"`
}

// poolsIn reads the configurations of a directory. The first one for a network counts, as for a runtime.
// Configurations that are not ours, not valid or not readable have no addresses.
func poolsIn(dir string) ([]pool, error) {
	files, err := libcni.ConfFiles(dir, []string{".conf", ".conflist", ".json"})
	if err != nil {
		return nil, err
	}
	slices.Sort(files)
	var pools []pool
	for _, file := range files {
		text, err := os.ReadFile(file)
		var list conf
		isKnown := func(p pool) bool { return p.network == list.Name }
		if err != nil || json.Unmarshal(text, &list) != nil || slices.ContainsFunc(pools, isKnown) {
			continue
		}
		p, err := poolOf(list)
		if err != nil {
			return nil, err
		}
		pools = append(pools, p)
	}
	return pools, nil
}

// poolOf returns the pool of a list, or of a single plugin.
func poolOf(list conf) (pool, error) {
	p := pool{network: list.Name}
	for _, plugin := range append(list.Plugins, list) {
		var section struct {
			Type string `json:"type"`
		}
		if plugin.Type != config.PluginType || json.Unmarshal(plugin.IPAM, &section) != nil || !slices.Contains([]string{"host-local", "ebpfnet-ipam"}, section.Type) {
			continue
		}
		parsed, err := ipam.Parse(list.Name, plugin.IPAM, ipam.Request{})
		if err != nil {
			continue
		}
		ranges, err := parsed.Usage()
		if err != nil {
			return pool{}, err
		}
		p.ranges = append(p.ranges, ranges...)
	}
	return p, nil
}
