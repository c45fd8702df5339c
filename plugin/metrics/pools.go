package metrics

import (
	"encoding/json"
	"slices"

	"github.com/containernetworking/cni/libcni"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/runtimes"
)

// pool counts the addresses of a network and the reserved ones.
type pool struct {
	network string
	ranges  []ipam.Usage
}

// poolsOf reads the configurations that runtimes see. The first one for a network counts, as for a runtime.
// Configurations that are not ours, not valid or not readable have no addresses.
func poolsOf(o runtimes.Options) (pools []pool, err error) {
	found, _ := o.Find() // doctor reports a runtime that cannot be read
	for _, r := range found {
		files, err := r.Files()
		if err != nil {
			return nil, err
		}
		for _, file := range files {
			isKnown := func(p pool) bool { return p.network == file.List.Name }
			if file.List == nil || slices.ContainsFunc(pools, isKnown) {
				continue
			}
			p, err := poolOf(file.List)
			if err != nil {
				return nil, err
			}
			pools = append(pools, p)
		}
	}
	return pools, nil
}

// poolOf returns the pool of a list.
func poolOf(list *libcni.NetworkConfigList) (pool, error) {
	p := pool{network: list.Name}
	for _, plugin := range list.Plugins {
		var keys struct {
			IPAM json.RawMessage `json:"ipam"`
		}
		isOurs := plugin.Network.Type == config.PluginType && slices.Contains([]string{"host-local", "ebpfnet-ipam"}, plugin.Network.IPAM.Type)
		if !isOurs || json.Unmarshal(plugin.Bytes, &keys) != nil {
			continue
		}
		parsed, err := ipam.Parse(list.Name, keys.IPAM, ipam.Request{})
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
